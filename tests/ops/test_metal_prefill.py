"""Prefill's kernels on the Metal device over the software Metal: with the detector, in every order,
no report, and numbers as the formulas in float64 have them. A row's bits depend on the row alone.
And each barrier taken away in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import oracle_gemm
import oracle_rows
import pytest
from harness import (
    PRECISIONS,
    SOFTMETAL,
    WIDE_PRECISIONS,
    Weight,
    assert_close32,
    check_new_rows,
    from_int8,
    metal_missing,
    normals,
    random_weight,
    rounded,
    to_int8,
)
from metal_cases import Case, check, dispatch, flattened, run_source

from lily import _testing
from softmetal.library import ORDERS
from softmetal.mutations import without_each_barrier

MISSING = metal_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

EPS = 1e-6

precisions = pytest.mark.parametrize("precision", PRECISIONS)
wide_precisions = pytest.mark.parametrize("precision", WIDE_PRECISIONS)


def generator(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(list(numbers))


# Rows.


def norm(precision: str, rows: int, d: int) -> Case:
    rng = generator(rows, d)
    x, gamma = normals(rng, rows, d) * 3, normals(rng, d)
    return Case(
        "prefill_norm",
        {"D": d, "EPS": EPS},
        {"rows": rows},
        {"x": x, "gamma": gamma, "y": x.shape},
        {"y": (oracle.norm(x, gamma, EPS), True)},
        precision,
    )


@precisions
@pytest.mark.parametrize("shape", [(5, 2048), (1, 64), (4, 192), (3, 4096), (0, 64)])
def test_norm(precision: str, shape: Any) -> None:
    check(norm(precision, *shape))


def gated_norm(precision: str, rows: int, heads: int, dv: int) -> Case:
    rng = generator(rows, heads, dv)
    o, gamma = normals(rng, rows, heads, dv), normals(rng, dv)
    z = rounded(normals(rng, rows, heads, dv) * 4, precision)
    return Case(
        "prefill_gated_norm",
        {"HEADS": heads, "DV": dv, "EPS": EPS},
        {"rows": rows},
        {"o": o, "z": z, "gamma": gamma, "u": o.shape},
        {"u": (oracle_rows.gated_norm(o, z, gamma, EPS), True)},
        precision,
    )


@precisions
@pytest.mark.parametrize("shape", [(3, 32, 128), (1, 1, 32), (5, 3, 96), (2, 2, 256), (0, 2, 64)])
def test_gated_norm(precision: str, shape: Any) -> None:
    check(gated_norm(precision, *shape))


def topk(logits: Any, top: int) -> Case:
    rows, experts = len(logits), logits.shape[1] - 1
    expected: Any = {}
    if rows:
        ids, shares = oracle_rows.route(logits, experts, top)
        expected = {"ids": (ids, False), "shares": (shares, False)}
    return Case(
        "prefill_topk",
        {"EXPERTS": experts, "TOP": top},
        {"rows": rows},
        {"logits": logits, "ids": (rows, top), "shares": (rows, top + 1)},
        expected,
    )


@pytest.mark.parametrize(
    "shape", [(5, 256, 8), (1, 1, 1), (3, 33, 33), (2, 100, 12), (1, 70, 64), (0, 8, 2)]
)
@pytest.mark.parametrize("levels", [0, 5])
def test_topk(shape: tuple[int, int, int], levels: int) -> None:
    rows, experts, top = shape
    rng = generator(*shape)
    logits = normals(rng, rows, experts + 1) * 3
    if levels:  # many ties
        logits = rng.integers(0, levels, logits.shape).astype(np.float32)
    case = topk(logits, top)
    got = check(case)
    if rows:
        assert np.array_equal(got["ids"], case.expected["ids"][0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [slice(None), slice(0, 3), slice(5, 6)])
def test_topk_names_experts_whatever_the_logits(value: float, places: slice) -> None:
    logits = normals(generator(0), 2, 17)
    logits[0, places] = value
    got = dispatch(topk(logits, 4), "metal")
    ids = got["ids"]
    assert len(set(ids[0])) == 4
    assert np.all(ids < 16)
    assert np.array_equal(ids[1:], oracle_rows.route(logits[1:], 16, 4)[0])


def scatter(ids: Any, experts: int) -> Case:
    rows, top = ids.shape
    named = zip(("offsets", "src", "inv"), oracle_rows.group(ids, experts), strict=True)
    return Case(
        "prefill_scatter",
        {"EXPERTS": experts, "TOP": top},
        {"rows": rows},
        {"ids": ids, "offsets": (experts + 1,), "src": (rows * top,), "inv": (rows, top)},
        {name: (values, False) for name, values in named},
    )


@pytest.mark.parametrize(
    "shape", [(40, 256, 8), (1, 5, 3), (17, 3, 1), (33, 9, 4), (0, 4, 2), (7, 33, 5)]
)
def test_scatter(shape: tuple[int, int, int]) -> None:
    rows, experts, top = shape
    rng = generator(*shape)
    chosen = [rng.permutation(experts)[:top] for _ in range(rows)]
    case = scatter(np.array(chosen, np.uint32).reshape(rows, top), experts)
    got = check(case)
    for name, (values, _) in case.expected.items():
        assert np.array_equal(got[name], values), name


@pytest.mark.parametrize("expert", [0, 4])
def test_scatter_to_one_expert(expert: int) -> None:
    case = scatter(np.full((130, 1), expert, np.uint32), 5)
    assert np.array_equal(check(case)["src"], np.arange(130))


def test_scatter_of_more_rows_than_16_bits_hold() -> None:
    case = scatter(generator(0).integers(0, 16, (9000, 8), dtype=np.uint32), 16)
    got = check(case, ["in_turn"], "metal plain")
    for name, (values, _) in case.expected.items():
        assert np.array_equal(got[name], values), name


def combine(precision: str, rows: int, d: int, top: int) -> Case:
    rng = generator(rows, d, top)
    x = normals(rng, rows, d)
    out = rounded(normals(rng, rows * top, d), precision)
    shared_out = rounded(normals(rng, rows, d), precision)
    inv = rng.permutation(rows * top).reshape(rows, top).astype(np.uint32)
    shares = rng.uniform(0, 1, (rows, top + 1)).astype(np.float32)
    return Case(
        "prefill_combine",
        {"D": d, "TOP": top, "GROUPED": 1},
        {"rows": rows},
        {"out": out, "shared_out": shared_out, "inv": inv, "shares": shares, "x": x},
        {"x": (oracle_rows.combine(x, out, shared_out, inv, shares), False)},
        precision,
    )


@precisions
@pytest.mark.parametrize("shape", [(3, 2048, 8), (1, 64, 1), (5, 1088, 3), (0, 64, 2)])
def test_combine(precision: str, shape: Any) -> None:
    check(combine(precision, *shape))


# The delta rule.


def delta_prep(precision: str, rows: int, position: int, shape: Any) -> Case:
    key_heads, heads, dk, dv = shape
    rng = generator(rows, position, *shape)
    channels = 2 * key_heads * dk + heads * dv
    slots = {
        "qkv": rounded(normals(rng, rows, channels), precision),
        "ring": rounded(normals(rng, 4, channels), precision),
        "conv": normals(rng, channels, 4) * 0.5,
        "gates": normals(rng, rows, 2, heads) * 4,
        "decay": np.stack([-rng.uniform(0.01, 8, heads), rng.uniform(-5, 3, heads)]),
    }
    outputs = {
        "q": (rows, key_heads, dk),
        "k": (rows, key_heads, dk),
        "v": (rows, heads, dv),
        "steps": (rows, 2, heads),
    }
    expected = oracle_rows.delta_inputs(
        **slots, position=position, shape=(key_heads, heads, dk, dv)
    )
    return Case(
        "prefill_delta_prep",
        {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv},
        {"rows": rows, "position": position},
        slots | outputs,
        {name: (values, name != "steps") for name, values in expected.items()},
        precision,
    )


@precisions
@pytest.mark.parametrize(
    ("rows", "position", "shape"),
    [
        (3, 6, (16, 32, 128, 128)),
        (1, 0, (1, 1, 32, 32)),
        (2, 1, (1, 40, 32, 64)),
        (70, 7, (1, 2, 96, 160)),
        (17, 3, (2, 4, 256, 256)),
    ],
)
def test_delta_prep(precision: str, rows: int, position: int, shape: Any) -> None:
    got = check(delta_prep(precision, rows, position, shape))
    expected = delta_prep(precision, rows, position, shape).expected["steps"][0]
    assert_close32(got["steps"], expected, 1e-6)


def ring(precision: str, rows: int, position: int, channels: int) -> Case:
    rng = generator(rows, position)
    qkv = rounded(normals(rng, rows, channels), precision)
    before = rounded(normals(rng, 4, channels), precision)
    after = before.copy()
    for i, row in enumerate(qkv):
        after[(position + i) & 3] = row
    return Case(
        "prefill_ring",
        {"CHANNELS": channels},
        {"rows": rows, "position": position},
        {"qkv": qkv, "ring": before},
        {"ring": (after, True)},
        precision,
    )


@precisions
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 130])
def test_ring(precision: str, rows: int) -> None:
    for position in (0, 1, 7):
        case = ring(precision, rows, position, 288)
        assert np.array_equal(check(case)["ring"], case.expected["ring"][0])


def delta_scan(precision: str, rows: int, shape: Any) -> Case:
    key_heads, heads, dk, dv = shape
    rng = generator(rows, *shape)

    def unit(scale: float) -> Any:
        a = normals(rng, rows, key_heads, dk)
        return rounded(a / np.linalg.norm(a, axis=-1, keepdims=True) * scale, precision)

    q, k = unit(dk**-0.5), unit(1.0)
    v = rounded(normals(rng, rows, heads, dv), precision)
    steps = rng.uniform(0.02, 0.999, (rows, 2, heads)).astype(np.float32)
    state = normals(rng, heads, dv, dk)
    after, o = oracle_rows.delta_scan(q, k, v, steps, state)
    return Case(
        "prefill_delta_scan",
        {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv},
        {"rows": rows},
        {"q": q, "k": k, "v": v, "steps": steps, "state_in": state}
        | {"state_out": state.shape, "o": v.shape},
        {"state_out": (after, False), "o": (o, False)},
        precision,
    )


@precisions
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (3, (2, 4, 128, 128)),
        (1, (1, 1, 32, 32)),
        (40, (1, 3, 96, 32)),
        (2, (2, 2, 256, 64)),
        (0, (1, 2, 64, 32)),
    ],
)
def test_delta_scan(precision: str, rows: int, shape: Any) -> None:
    case = delta_scan(precision, rows, shape)
    got = check(case)
    for name, (values, _) in case.expected.items():
        if rows:
            assert_close32(got[name], values, 2e-6)


# Attention.


def attend_prep(precision: str, rows: int, position: int, shape: Any, rotary: int) -> Case:
    heads, kv_heads, dh = shape
    rng = generator(rows, position, *shape, rotary)
    qkv = rounded(normals(rng, rows, 2 * (heads + kv_heads) * dh), precision)
    q_norm, k_norm = normals(rng, dh), normals(rng, dh)
    frequencies = (1e7 ** -(np.arange(rotary // 2) * 2 / rotary)).astype(np.float32)
    capacity = position + rows + 2
    cache = rounded(normals(rng, 2, kv_heads, capacity, dh), precision)
    q, _, k, v = oracle_rows.split_qkv(qkv, heads, kv_heads, dh)
    keys, values = cache[0].astype(np.float64), cache[1].astype(np.float64)
    new = slice(position, position + rows)
    keys[:, new] = oracle_rows.rotate(oracle.norm(k, k_norm, EPS), position, frequencies).swapaxes(
        0, 1
    )
    values[:, new] = v.swapaxes(0, 1)
    q = oracle_rows.rotate(oracle.norm(q, q_norm, EPS), position, frequencies) * dh**-0.5
    return Case(
        "prefill_attend_prep",
        {"HEADS": heads, "KV_HEADS": kv_heads, "DH": dh, "ROTARY": rotary, "EPS": EPS},
        {"rows": rows, "position": position, "capacity": capacity},
        {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "frequencies": frequencies}
        | {"keys": cache[0], "values": cache[1], "q": (rows, heads, dh)},
        {"q": (q, True), "keys": (keys, True), "values": (values, True)},
        precision,
    )


@precisions
@pytest.mark.parametrize(
    ("rows", "position", "shape", "rotary"),
    [
        (2, 77, (16, 2, 256), 64),
        (1, 0, (1, 1, 32), 32),
        (5, 9, (3, 3, 96), 10),
        (3, 262_000, (2, 1, 32), 16),
        (2, 3, (4, 2, 64), 64),
    ],
)
def test_attend_prep(precision: str, rows: int, position: int, shape: Any, rotary: int) -> None:
    check(attend_prep(precision, rows, position, shape, rotary))


def test_attend_prep_of_keys_and_values_alone() -> None:
    case = attend_prep("fast", 3, 6, (8, 2, 64), 32)
    case.constants["CACHE_ONLY"] = 1
    del case.slots["q"], case.expected["q"]
    check(case)


@precisions
def test_attend_prep_of_an_int8_cache(precision: str) -> None:
    rows, position, shape = 5, 9, (4, 2, 96)
    case = attend_prep(precision, rows, position, shape, 32)
    case.constants["KV_INT8"] = 1
    wanted = {name: case.expected.pop(name)[0] for name in ("keys", "values")}
    for name in wanted:
        case.slots[name] = to_int8(case.slots[name])
    got = check(case)
    for name, values in wanted.items():
        new = values[:, position : position + rows]
        check_new_rows(got[name], case.slots[name], new, position)


def attend_inputs(rng: Any, precision: str, rows: int, position: int, shape: Any) -> dict[str, Any]:
    """Scores of deviation 2, more than a model's. Entries after the last row's are poison."""
    heads, kv_heads, dh = shape
    cache = rounded(normals(rng, 2, kv_heads, position + rows + 2, dh), precision)
    cache[:, :, position + rows :] = np.nan
    return {
        "q": rounded(normals(rng, rows, heads, dh) * 2 * dh**-0.5, precision),
        "keys": cache[0],
        "values": cache[1],
        "qkv": rounded(normals(rng, rows, 2 * (heads + kv_heads) * dh), precision),
    }


def attend(
    precision: str, inputs: dict[str, Any], position: int, shape: Any, **constants: int
) -> Case:
    heads, kv_heads, dh = shape
    q = inputs["q"]
    rows = len(q)
    gates = oracle_rows.split_qkv(inputs["qkv"], *shape)[1]
    u = oracle_rows.attend(q, inputs["keys"], inputs["values"], gates, position)
    return Case(
        "prefill_attend",
        {"HEADS": heads, "KV_HEADS": kv_heads, "DH": dh, **constants},
        {"rows": rows, "position": position, "capacity": inputs["keys"].shape[1]},
        {**inputs, "u": q.shape},
        {"u": (u, True)},
        precision,
    )


ATTEND_TOLERANCE = {"float32": 2e-6, "fast": 5e-3}

ATTEND_SHAPES = [
    (3, 17, (16, 2, 256)),
    (1, 0, (1, 1, 32)),
    (7, 31, (3, 1, 96)),
    (35, 2, (2, 2, 64)),
    (5, 48, (5, 1, 32)),
    (2, 33, (16, 1, 128)),
    (9, 15, (4, 1, 192)),
]


@precisions
@pytest.mark.parametrize(("rows", "position", "shape"), ATTEND_SHAPES)
def test_attend(precision: str, rows: int, position: int, shape: Any) -> None:
    inputs = attend_inputs(generator(rows, position), precision, rows, position, shape)
    case = attend(precision, inputs, position, shape)
    got = check(case)
    assert_close32(got["u"], case.expected["u"][0], ATTEND_TOLERANCE[precision])


@pytest.mark.skipif(not SOFTMETAL, reason="counts what the software Metal is given")
def test_attend_in_slices() -> None:
    """Attention that is cut by rows, for the time that one dispatch takes, has the same bits."""
    rows, position, shape = ATTEND_SHAPES[2]
    inputs = attend_inputs(generator(rows, position), "fast", rows, position, shape)
    case = attend("fast", inputs, position, shape)
    whole = check(case)
    try:
        _testing.metal_budget("metal", 3)
        before = _testing.fake_number("dispatches")
        cut = dispatch(case, "metal")
        assert _testing.fake_number("dispatches") - before == 3
    finally:
        _testing.metal_budget("metal", None)
    assert np.array_equal(cut["u"], whole["u"])


@precisions
def test_attend_with_heads_apart(precision: str) -> None:
    inputs = attend_inputs(generator(5), precision, 35, 2, (6, 2, 64))
    case = attend(precision, inputs, 2, (6, 2, 64), APART=1)
    got = check(case)
    assert_close32(got["u"], case.expected["u"][0], ATTEND_TOLERANCE[precision])


@precisions
@pytest.mark.parametrize(("rows", "position", "shape"), [ATTEND_SHAPES[0], (40, 31, (3, 1, 96))])
def test_attend_over_an_int8_cache(precision: str, rows: int, position: int, shape: Any) -> None:
    # The oracle sees what the codes stand for; those after the last row's are poison.
    inputs = attend_inputs(generator(rows, position), precision, rows, position, shape)
    stored, codes = {}, {}
    for name in ("keys", "values"):
        cache = inputs[name]
        cache[:, position + rows :] = 0
        codes[name] = to_int8(cache)
        stored[name] = from_int8(codes[name], cache.shape)
        poisoned = codes[name][: cache.size].reshape(cache.shape)
        poisoned[:, position + rows :] = 0x80
        scales = codes[name][cache.size :].view(np.float32).reshape(cache.shape[:2])
        scales[:, position + rows :] = np.nan
    case = attend(precision, inputs | stored, position, shape, KV_INT8=1)
    case.slots |= codes
    got = check(case)
    assert_close32(got["u"], case.expected["u"][0], ATTEND_TOLERANCE[precision])
    cut = rows // 2  # a row's bits depend on the row alone
    right = attend(
        precision, rows_of(inputs | stored, slice(cut, None)), position + cut, shape, KV_INT8=1
    )
    right.slots |= codes
    assert same_bits(dispatch(right)["u"], got["u"][cut:])


@pytest.mark.parametrize(("rows", "position", "shape"), ATTEND_SHAPES[:3])
def test_attend_in_half(rows: int, position: int, shape: Any) -> None:
    inputs = attend_inputs(generator(rows, position), "fast", rows, position, shape)
    inputs["values"][:, 0] = rounded(np.array(3e5), "fast")  # beyond half: 65504
    case = attend("fast", inputs, position, shape)
    case.slots["values"] = inputs["values"].copy()
    inputs["values"][:, 0] = 65504
    expected = attend("fast", inputs, position, shape).expected["u"][0]
    source = "#define LILY_HALF_TILES 1\n" + flattened("prefill_attend.metal")
    heads, kv_heads, _ = shape
    groups = (kv_heads, -(-rows * heads // kv_heads // 32))
    reports, got = run_source(case, source, groups, 128)
    assert not reports
    assert_close32(got["u"], expected, ATTEND_TOLERANCE["fast"])


def attended(precision: str, inputs: dict[str, Any], position: int, shape: Any) -> Any:
    got = dispatch(attend(precision, inputs, position, shape))
    return got["u"]


def rows_of(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {**inputs, "q": inputs["q"][rows], "qkv": inputs["qkv"][rows]}


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


@precisions
@pytest.mark.parametrize("shape", [(6, 2, 64), (8, 1, 32), (5, 5, 96)])
def test_an_attended_rows_bits_depend_on_the_row_alone(precision: str, shape: Any) -> None:
    position, rows = 100, 70
    inputs = attend_inputs(generator(1), precision, rows, position, shape)
    u = attended(precision, inputs, position, shape)
    for i in range(rows):
        one = attended(precision, rows_of(inputs, slice(i, i + 1)), position + i, shape)
        assert same_bits(one[0], u[i]), i
    for cut in (1, 11, 33):
        right = attended(precision, rows_of(inputs, slice(cut, None)), position + cut, shape)
        assert same_bits(right, u[cut:]), cut


@precisions
@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e10])
def test_scores_of_any_size(precision: str, size: float) -> None:
    # Key n is n mod 7 in one place: the scores are multiples of `size`, the largest shared by many.
    shape, position, rows = (2, 1, 32), 300, 20
    inputs = attend_inputs(generator(3), precision, rows, position, shape)
    inputs["q"][:] = 0
    inputs["q"][:, 0, 0], inputs["q"][:, 1, 0] = size, -size
    inputs["keys"][0, :, 0] = np.arange(inputs["keys"].shape[1]) % 7
    inputs["q"] = rounded(inputs["q"], precision)
    expected = attend(precision, inputs, position, shape).expected["u"][0]
    u = attended(precision, inputs, position, shape)
    assert_close32(u, expected, ATTEND_TOLERANCE[precision])


@precisions
def test_scores_that_rise_and_fall(precision: str) -> None:
    # The largest score so far moves in most tiles of one head and in none of the other.
    shape, position, rows = (2, 1, 32), 700, 9
    inputs = attend_inputs(generator(4), precision, rows, position, shape)
    inputs["q"][:, 0, 0], inputs["q"][:, 1, 0] = 1, -1
    inputs["keys"][0, :, 0] = rounded(np.arange(inputs["keys"].shape[1]) / 8, precision)
    expected = attend(precision, inputs, position, shape).expected["u"][0]
    u = attended(precision, inputs, position, shape)
    assert_close32(u, expected, 1e-5 if precision == "float32" else 5e-3)


@precisions
def test_a_nan_stays_in_its_row(precision: str) -> None:
    shape, position, rows = (4, 1, 32), 150, 12
    inputs = attend_inputs(generator(6), precision, rows, position, shape)
    clean = attended(precision, inputs, position, shape)
    inputs["q"][5, 2, 3] = np.nan
    u = attended(precision, inputs, position, shape)
    assert np.isnan(u[5, 2]).all()
    u[5, 2] = clean[5, 2]
    assert same_bits(u, clean)


# Products.


def delta_project(y: Any, w: Weight, precision: str) -> Case:
    channels, values, heads, _ = (len(m) for m in w.matrices)
    qkv, z, b, a = (oracle_gemm.project(y, m) for m in w.matrices)
    return Case(
        "prefill_delta_project",
        {"D": y.shape[1], "CHANNELS": channels, "VALUES": values, "HEADS": heads},
        {"rows": len(y)},
        {"y": y, "weight": w, "qkv": qkv.shape, "z": z.shape, "gates": (len(y), 2, heads)},
        {"qkv": (qkv, True), "z": (z, True), "gates": (np.stack([b, a], 1), False)},
        precision,
    )


def attend_project(y: Any, w: Weight, precision: str) -> Case:
    qkv = oracle_gemm.project(y, w.matrix)
    return Case(
        "prefill_attend_project",
        {"D": y.shape[1], "N": qkv.shape[1]},
        {"rows": len(y)},
        {"y": y, "weight": w, "qkv": qkv.shape},
        {"qkv": (qkv, True)},
        precision,
    )


def project_add(u: Any, w: Weight, precision: str) -> Case:
    x = normals(generator(9), len(u), len(w.matrix))
    return Case(
        "prefill_project_add",
        {"K": u.shape[1], "N": x.shape[1]},
        {"rows": len(u)},
        {"u": u, "weight": w, "x": x},
        {"x": (x + oracle_gemm.project(u, w.matrix), False)},
        precision,
    )


def head(y: Any, w: Weight, precision: str) -> Case:
    logits = oracle_gemm.project(y, w.matrix)
    return Case(
        "prefill_head",
        {"D": y.shape[1], "V": logits.shape[1]},
        {"rows": len(y)},
        {"y": y, "weight": w, "logits": logits.shape},
        {"logits": (logits, False)},
        precision,
    )


def route(y: Any, w: Weight, precision: str) -> Case:
    router, gate, shared_gate, shared_up = w.matrices
    logits = oracle_gemm.project(y, np.concatenate([router, gate]))
    shared = oracle_gemm.gated(y, shared_gate, shared_up)
    return Case(
        "prefill_route",
        {"D": y.shape[1], "EXPERTS": len(router), "SHARED": shared.shape[1]},
        {"rows": len(y)},
        {"y": y, "weight": w, "logits": logits.shape, "shared": shared.shape},
        {"logits": (logits, False), "shared": (shared, True)},
        precision,
    )


DENSE: dict[str, tuple[Callable[[Any, Weight, str], Case], list[Any]]] = {
    # shapes of the segments (of columns d) and their bits
    "delta_project": (
        delta_project,
        [([70, 33, 5, 5], 128, 4), ([70, 9, 2, 2], 192, [4, 16, 8, 4]), ([64, 64, 32, 32], 64, 4)],
    ),
    "attend_project": (attend_project, [([64, 32, 32], 64, 4), ([30, 7, 9], 192, [8, 4, 16])]),
    "project_add": (project_add, [([70], 128, 4), ([1], 64, 8), ([66], 320, 16)]),
    "head": (head, [([129], 64, 4), ([64], 128, 8)]),
    "route": (
        route,
        [([64, 1, 40, 40], 128, 8), ([3, 1, 16, 16], 64, 4), ([70, 1, 33, 33], 64, [8, 8, 4, 4])],
    ),
}
DENSE_CASES = [(name, i) for name, (_, shapes) in DENSE.items() for i in range(len(shapes))]


def dense(name: str, i: int, rows: int, precision: str) -> Case:
    make, shapes = DENSE[name]
    segments, d, bits = shapes[i]
    rng = generator(rows, i)
    w = random_weight(rng, [(n, d) for n in segments], bits)
    return make(rounded(normals(rng, rows, d), precision), w, precision)


@precisions
@pytest.mark.parametrize("rows", [1, 33, 65])
@pytest.mark.parametrize(("name", "i"), DENSE_CASES)
def test_dense_products(name: str, i: int, rows: int, precision: str) -> None:
    check(dense(name, i, rows, precision), ORDERS if rows == 33 else ["ahead"])


@wide_precisions
def test_real_widths(precision: str) -> None:
    rng = generator(2)
    for make, shapes, k, bits in (
        (delta_project, [(192, 2048), (64, 2048), (32, 2048), (32, 2048)], 2048, 4),
        (project_add, [(128, 4096)], 4096, 4),
        (route, [(256, 2048), (1, 2048), (64, 2048), (64, 2048)], 2048, 8),
    ):
        y = rounded(normals(rng, 10, k), precision)
        check(make(y, random_weight(rng, shapes, bits), precision), ["ahead"])


@precisions
@pytest.mark.parametrize("name", ["delta_project", "route", "project_add"])
def test_no_rows(name: str, precision: str) -> None:
    make, _ = DENSE[name]
    w = random_weight(
        generator(1), [(8, 64), (1, 64), (8, 64), (8, 64)][: 1 if "add" in name else 4]
    )
    case = make(np.zeros((0, 64), np.float32), w, precision)
    check(case)


def experts_up(
    precision: str,
    counts: list[int],
    d: int,
    f: int,
    bits: Any,
    tokens: int = 9,
    tile_rows: int = 64,
) -> Case:
    rng = generator(d, f, *counts)
    w = random_weight(rng, [(f, d), (f, d)], bits, len(counts))
    offsets, src = oracle_gemm.grouping(rng, counts, tokens)
    y = rounded(normals(rng, tokens, d), precision)
    gate, up = (m.reshape(len(counts), -1, d) for m in w.matrices)
    h = oracle_gemm.experts_up(y, offsets, src, gate, up)
    return Case(
        "prefill_experts_up",
        {"D": d, "EXPERTS": len(counts), "TOP": 1, "F": f, "TILE_ROWS": tile_rows},
        {"rows": len(src)},
        {"y": y, "offsets": offsets, "src": src, "weight": w, "h": h.shape},
        {"h": (h, True)},
        precision,
    )


def experts_down(
    precision: str,
    counts: list[int],
    f: int,
    shared: int,
    d: int,
    bits: Any = (4, 4),
    tokens: int = 9,
    tile_rows: int = 64,
) -> Case:
    rng = generator(d, f, *counts)
    w = random_weight(rng, [(d, f)], bits[0], len(counts))
    ws = random_weight(rng, [(d, shared)], bits[1])
    offsets, src = oracle_gemm.grouping(rng, counts, tokens)
    h = rounded(normals(rng, len(src), f), precision)
    s = rounded(normals(rng, tokens, shared), precision)
    out = oracle_gemm.experts_down(h, offsets, w.matrices[0].reshape(len(counts), d, f))
    return Case(
        "prefill_experts_down",
        {"D": d, "EXPERTS": len(counts), "TOP": 1, "F": f, "SHARED": shared}
        | {"TILE_ROWS": tile_rows},
        {"rows": tokens},
        {"h": h, "shared": s, "offsets": offsets, "weight": w, "shared_weight": ws}
        | {"out": out.shape, "shared_out": (tokens, d)},
        {"out": (out, True), "shared_out": (oracle_gemm.project(s, ws.matrix), True)},
        precision,
    )


# Rows of each expert, and of a tile.
COUNTS = [
    ([1], 16),
    ([0, 70, 0, 1, 9], 32),
    ([64, 0, 65], 64),
    ([3] * 40, 16),
    ([0, 0, 130], 32),
    ([16, 0, 17, 15], 16),
]


@precisions
@pytest.mark.parametrize(("counts", "tile_rows"), COUNTS)
def test_experts_up(counts: list[int], tile_rows: int, precision: str) -> None:
    bits = [4, 8] if len(counts) == 3 else 4
    check(experts_up(precision, counts, 64, 40, bits, tile_rows=tile_rows))


@precisions
@pytest.mark.parametrize(("counts", "tile_rows"), COUNTS)
def test_experts_down(counts: list[int], tile_rows: int, precision: str) -> None:
    bits = (8, 4) if len(counts) == 3 else (4, 8)
    check(experts_down(precision, counts, 64, 128, 70, bits, tile_rows=tile_rows))


@wide_precisions
def test_experts_of_real_widths(precision: str) -> None:
    check(experts_up(precision, [0, 5, 0, 12], 2048, 512, 4), ["ahead"])
    check(experts_down(precision, [0, 5, 0, 12], 512, 512, 2048), ["ahead"])


@precisions
def test_more_tiles_than_threadgroups(precision: str) -> None:
    # The grid follows from `rows`: too few here, so each threadgroup takes several tiles.
    up = experts_up(precision, [3, 66, 0, 5], 64, 16, 4)
    up.params["rows"] = 1
    check(up)
    check(experts_down(precision, [3, 66, 0, 5], 64, 64, 16, tokens=1))


def test_more_than_32767_grouped_rows() -> None:
    counts = [0, 34_000, 0, 1, 700]
    check(experts_up("fast", counts, 64, 16, 4, tokens=600), ["in_turn"], "metal plain")
    check(experts_down("fast", counts, 64, 64, 16, tokens=600), ["in_turn"], "metal plain")


LONG_SUMS = {4: 5e-5, 8: 3e-4, 16: 1e-6}
"""Relative RMS of a product of 4096 columns in the fast build, by bits of the weight. Weights are
staged as half, 11 bits: a code of 4 bits times a bf16 scale, plus a bias, rounds in few of them,
one of 8 bits in most, and bf16 in none. The float32 build rounds nothing: 1e-6, as on the CPU."""


@pytest.mark.parametrize("bits", LONG_SUMS)
def test_long_sums_are_as_good_as_their_weights(bits: int) -> None:
    rng = generator(3)
    w = random_weight(rng, [(33, 4096)], bits)
    y = rounded(normals(rng, 40, 4096), "fast")
    for precision, bar in (("float32", 1e-6), ("fast", LONG_SUMS[bits])):
        case = head(y, w, precision)
        assert_close32(dispatch(case)["logits"], case.expected["logits"][0], bar)


# Bits.


@precisions
def test_a_rows_bits_depend_on_the_row_alone(precision: str) -> None:
    rng = generator(5)
    d = 192
    weights = {
        "delta_project": random_weight(rng, [(70, d), (33, d), (5, d), (5, d)], [4, 16, 8, 4]),
        "route": random_weight(rng, [(20, d), (1, d), (24, d), (24, d)], [8, 8, 4, 4]),
        "project_add": random_weight(rng, [(33, d)]),
    }
    y = rounded(normals(rng, 130, d), precision)

    def of(name: str, rows: slice) -> dict[str, Any]:
        case = DENSE[name][0](y[rows], weights[name], precision)
        if name == "project_add":
            case.slots["x"] = np.zeros((len(y[rows]), 33), np.float32)
        got = dispatch(case)
        return got.outputs

    parts = [slice(0, n) for n in (1, 2, 7, 8, 9, 16, 31, 33, 63, 64, 65, 129)]
    parts += [slice(t, t + 1) for t in (1, 40, 129)] + [slice(3, 50), slice(17, 130)]
    for name in weights:
        whole = of(name, slice(None))
        for part in parts:
            for slot, values in of(name, part).items():
                assert same_bits(values, whole[slot][part]), (name, slot, part)


@precisions
def test_a_grouped_rows_bits_depend_on_its_token_and_expert_alone(precision: str) -> None:
    rng = generator(6)
    tokens, d, f = 70, 128, 40
    up = random_weight(rng, [(f, d), (f, d)], [4, 8], 5)
    y = rounded(normals(rng, tokens, d), precision)

    def of(expert: int, rows: Any) -> Any:
        counts = [1] * 5
        counts[expert] = len(rows)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        src = np.zeros(offsets[-1], np.uint32)
        own = slice(offsets[expert], offsets[expert + 1])
        src[own] = rows
        case = experts_up(precision, counts, d, f, [4, 8], tokens)
        case.slots |= {"y": y, "offsets": offsets, "src": src, "weight": up}
        got = dispatch(case)
        return got["h"][own]

    for expert in (0, 3):
        whole = of(expert, np.arange(tokens))
        for n in (1, 7, 8, 9, 33, 64, 65):
            rows = rng.permutation(tokens)[:n]
            assert same_bits(of(expert, rows), whole[rows]), n


@precisions
def test_a_grouped_rows_bits_do_not_depend_on_the_tile(precision: str) -> None:
    counts = [3, 70, 0, 1, 33]

    def of(rows: int) -> list[Any]:
        up = experts_up(precision, counts, 128, 40, 4, tile_rows=rows)
        down = experts_down(precision, counts, 128, 128, 40, tokens=40, tile_rows=rows)
        low = dispatch(down)
        return [dispatch(up)["h"], low["out"], low["shared_out"]]

    whole = of(64)
    for rows in (16, 32):
        assert all(map(same_bits, of(rows), whole)), rows


@precisions
def test_a_row_that_is_not_finite_stays_alone(precision: str) -> None:
    rng = generator(7)
    w = random_weight(rng, [(40, 128)])
    y = rounded(normals(rng, 37, 128), precision)
    before = dispatch(head(y, w, precision))["logits"]
    y[5, 7], y[20] = np.nan, np.inf
    after = dispatch(head(y, w, precision))["logits"]
    others = [t for t in range(37) if t not in (5, 20)]
    assert same_bits(before[others], after[others])
    assert np.isnan(after[5]).all()
    assert not np.isfinite(after[20]).any()


@precisions
def test_cut_anywhere(precision: str) -> None:
    """The delta rule over two pieces of a prompt, and over one."""
    shape, rows = (1, 2, 64, 32), 40
    whole = delta_scan(precision, rows, shape)
    got = dispatch(whole)
    state = whole.slots["state_in"]
    pieces = []
    for part in (slice(0, 1), slice(1, 18), slice(18, 40)):
        case = delta_scan(precision, part.stop - part.start, shape)
        for name in ("q", "k", "v", "steps"):
            case.slots[name] = whole.slots[name][part]
        case.slots["state_in"] = state
        done = dispatch(case)
        state = done["state_out"]
        pieces.append(done["o"])
    assert same_bits(np.concatenate(pieces), got["o"])
    assert same_bits(state, got["state_out"])


# Barriers.


def rising_scores() -> Case:
    """Scores that rise, so that the output is rescaled in every tile."""
    rows, position, shape = 3, 37, (4, 1, 64)
    inputs = attend_inputs(generator(8), "fast", rows, position, shape)
    inputs["q"][:, :, 0] = 1
    inputs["keys"][0, :, 0] = np.arange(inputs["keys"].shape[1]) * 4
    return attend("fast", inputs, position, shape)


# Op → how many barriers, a case, threadgroups (fewer than tiles, where a kernel may go on to
# another), threads.
BARRIERS: dict[str, tuple[int, Callable[[], Case], tuple[int, ...], int]] = {
    "prefill_attend_prep": (1, lambda: attend_prep("fast", 2, 3, (4, 2, 64), 32), (2, 2), 128),
    "prefill_attend": (10, rising_scores, (1, 1), 128),
    "prefill_project_add": (4, lambda: dense("project_add", 0, 33, "fast"), (1, 2), 128),
    "prefill_experts_up": (5, lambda: experts_up("fast", [3, 66, 5], 128, 40, 4), (2, 2), 128),
    "prefill_experts_down": (
        5,
        lambda: experts_down("fast", [3, 66, 5], 128, 64, 40),
        (3, 1),
        128,
    ),
}


@pytest.mark.parametrize("op", BARRIERS)
def test_each_barrier_is_missed(op: str) -> None:
    count, make, groups, threads = BARRIERS[op]
    case, whole = make(), flattened(f"{op}.metal", {"prefill_attend_tensor.h"})
    assert not run_source(case, whole, groups, threads)[0]
    mutants = list(without_each_barrier(whole))
    assert len(mutants) == count
    silent = [line for line, m in mutants if not run_source(case, m, groups, threads)[0]]
    assert not silent
