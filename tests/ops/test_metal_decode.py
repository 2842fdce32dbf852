"""Decode's kernels on the Metal device over the software Metal: with the detector, in every order,
no report, and numbers as the formulas in float64 have them; bytes of weights read once; and each
barrier taken away in turn."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from harness import (
    CONTRACTS,
    POISON,
    PRECISIONS,
    WIDE_PRECISIONS,
    Result,
    Weight,
    all_constants,
    check_new_rows,
    encode,
    from_int8,
    metal_missing,
    metal_order,
    normals,
    params_fields,
    random_weight,
    relative_rms,
    rounded,
    run,
    storage,
    to_int8,
)

from softmetal.library import ORDERS, Library, Order, Slot, read
from softmetal.mutations import without_each_barrier

MISSING = metal_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

METAL = Path(__file__).parents[2] / "metal"
EPS = 1e-6


@dataclass
class Case:
    """One dispatch, and what it should leave."""

    op: str
    constants: dict[str, float]
    params: dict[str, float]
    slots: dict[str, Any]
    expected: dict[str, tuple[Any, bool]]
    """Name → values, and whether they are activations."""
    precision: str = "float32"
    weight_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of packed slots that have to be read, each at least once, and no others."""


def check(case: Case, orders: Sequence[Order] = ORDERS, isa: str = "metal") -> Result:
    for order in orders:
        with metal_order(order):
            got = run(case.op, case.constants, case.params, case.precision, isa=isa, **case.slots)
        for name, (values, act) in case.expected.items():
            got.expect(name, np.asarray(values), act=act)
        for name, expected in case.weight_bytes.items():
            assert got.counts[name][0] == expected
    return got


def weight_bytes(weight: Weight, experts: int = 1) -> int:
    """Codes, scales and biases of some experts."""
    total = 0
    for (bits, *_), matrix in zip(weight.raw, weight.matrices, strict=True):
        cells = matrix.shape[-2] * matrix.shape[-1]
        total += cells * bits // 8 + (cells // 64 * 4 if bits != 16 else 0)
    return total * experts


# Projections.


def delta_project(
    precision: str, d: int, channels: int, values: int, heads: int, bits: Any, position: int = 6
) -> Case:
    rng = np.random.default_rng(d + channels)
    x, gamma = normals(rng, d) * 3, normals(rng, d)
    w = random_weight(rng, [(channels, d), (values, d), (heads, d), (heads, d)], bits)
    ring = rounded(normals(rng, 4, channels), precision)
    y = oracle.norm(x, gamma, EPS)
    expected = ring.astype(np.float64)
    expected[position & 3] = w.matrices[0] @ y
    return Case(
        "delta_project",
        {"D": d, "CHANNELS": channels, "VALUES": values, "HEADS": heads, "EPS": EPS},
        {"position": position},
        {"x": x, "gamma": gamma, "weight": w, "ring": ring, "z": (values,), "gates": (2, heads)},
        {
            "ring": (expected, True),
            "z": (w.matrices[1] @ y, True),
            "gates": (np.stack([w.matrices[2] @ y, w.matrices[3] @ y]), False),
        },
        precision,
        {"weight": weight_bytes(w)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (512, 384, 128, 4, 4),
        (2048, 70, 33, 5, 4),
        (64, 30, 7, 3, [4, 8, 16, 4]),
        (576, 13, 9, 1, [16, 16, 8, 8]),
        (1024, 5, 1, 1, 8),
    ],
)
def test_delta_project(precision: str, shape: Any) -> None:
    check(delta_project(precision, *shape))


def attend_project(precision: str, d: int, rows: Any, bits: Any) -> Case:
    rng = np.random.default_rng(d + sum(rows))
    x, gamma = normals(rng, d), normals(rng, d)
    w = random_weight(rng, [(r, d) for r in rows], bits)
    return Case(
        "attend_project",
        {"D": d, "N": sum(rows), "EPS": EPS},
        {"rows": 1},
        {"x": x, "gamma": gamma, "weight": w, "qkv": (sum(rows),)},
        {"qkv": (w.matrix @ oracle.norm(x, gamma, EPS), True)},
        precision,
        {"weight": weight_bytes(w)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape", [(2048, (100, 16, 16), 4), (64, (1, 1, 1), [4, 16, 8]), (704, (30, 3, 2), [8, 8, 4])]
)
def test_attend_project(precision: str, shape: Any) -> None:
    check(attend_project(precision, *shape))


def project_add(
    precision: str, heads: int, width: int, partials: int, normed: bool, n: int, bits: Any
) -> Case:
    rng = np.random.default_rng(heads * width + n)
    u = rounded(normals(rng, heads, width), precision)
    squares, x = rng.uniform(0, width, (heads, partials)).astype(np.float32), normals(rng, n)
    w = random_weight(rng, [(n, heads * width)], bits)
    r = oracle.head_scales(squares, width, EPS)[:, None] if normed else 1.0
    return Case(
        "project_add",
        {
            "K": heads * width,
            "N": n,
            "HEADS": heads if normed else 0,
            "PARTIALS": partials if normed else 0,
            "EPS": EPS,
        },
        {"rows": 1},
        {"u": u, "squares": squares if normed else None, "weight": w, "x": x},
        {"x": (x + w.matrix @ (u.astype(np.float64) * r).ravel(), False)},
        precision,
        {"weight": weight_bytes(w)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (32, 128, 4, True, 37, 4),
        (16, 256, 1, False, 21, 4),
        (2, 32, 1, True, 1, 8),
        (66, 32, 2, True, 6, 16),
        (6, 96, 3, True, 9, 4),
    ],
)
def test_project_add(precision: str, shape: Any) -> None:
    check(project_add(precision, *shape))


def route_shared(precision: str, d: int, experts: int, shared: int, bits: Any) -> Case:
    rng = np.random.default_rng(d + experts)
    x, gamma = normals(rng, d), normals(rng, d)
    w = random_weight(rng, [(experts, d), (1, d), (shared, d), (shared, d)], bits)
    y = oracle.norm(x, gamma, EPS)
    return Case(
        "route_shared",
        {"D": d, "EXPERTS": experts, "SHARED": shared, "EPS": EPS},
        {"rows": 1},
        {"x": x, "gamma": gamma, "weight": w, "logits": (experts + 1,), "shared": (shared,)},
        {
            "logits": (np.concatenate(w.matrices[:2]) @ y, False),
            "shared": (oracle.gated(*oracle.f64(w.matrices[2], w.matrices[3], y)), True),
        },
        precision,
        {"weight": weight_bytes(w)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2048, 256, 64, [8, 8, 4, 4]),
        (512, 7, 33, 4),
        (64, 1, 1, [16, 8, 4, 8]),
        (192, 30, 5, [16, 16, 4, 16]),
    ],
)
def test_route_shared(precision: str, shape: Any) -> None:
    check(route_shared(precision, *shape))


def head(
    precision: str, d: int, v: int, valid: int, store: bool, maxima: int, bits: Any, row: int = 1
) -> Case:
    rng = np.random.default_rng(d + v)
    x, gamma = normals(rng, 3, d), normals(rng, d)
    w = random_weight(rng, [(v, d)], bits)
    logits = w.matrix @ oracle.norm(x[row], gamma, EPS)
    return Case(
        "head",
        {"D": d, "V": v, "VALID": valid, "STORE": int(store), "MAXIMA": maxima, "EPS": EPS},
        {"row": row},
        {
            "x": x,
            "gamma": gamma,
            "weight": w,
            "logits": (v,) if store else None,
            "maxima": (maxima, 2),
        },
        {"logits": (logits, False)} if store else {},
        precision,
        {"weight": weight_bytes(w)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2048, 300, 290, True, 2, 4),
        (64, 1, 1, True, 3, 8),
        (512, 100, 70, False, 7, 4),
        (128, 257, 300, True, 1, 16),
    ],
)
def test_head(precision: str, shape: Any) -> None:
    case = head(precision, *shape)
    got = check(case)
    valid = min(case.constants["VALID"], case.constants["V"])
    logits = case.slots["weight"].matrix @ oracle.norm(case.slots["x"][1], case.slots["gamma"], EPS)
    values, indices = got["maxima"].T
    numbers = values.copy().view(np.float32)
    assert (indices[numbers == -np.inf] == 0xFFFFFFFF).all()
    best = int(indices[np.argmax(numbers)])
    assert best < valid
    assert np.isclose(numbers.max(), logits[:valid].max(), rtol=1e-4)
    assert logits[best] >= logits[:valid].max() - 1e-4


def test_head_without_numbers() -> None:
    case = head("float32", 64, 40, 40, True, 2, 4)
    case.slots["x"] = np.full((3, 64), np.nan, np.float32)
    case.expected = {}
    got = check(case)
    assert (got["maxima"][:, 1] == 0xFFFFFFFF).all()


def experts_up(
    precision: str, d: int, experts: int, top: int, f: int, bits: Any, ties: bool = False
) -> Case:
    rng = np.random.default_rng(d + experts + f)
    x, gamma, logits = normals(rng, d), normals(rng, d), normals(rng, experts + 1) * 3
    if ties:
        logits = np.round(logits)
    w = random_weight(rng, [(f, d), (f, d)], bits, experts)
    ids, shares = oracle.choose(logits.astype(np.float64), experts, top)
    y = oracle.norm(x, gamma, EPS)
    gate, up = (m.reshape(experts, f, d) for m in w.matrices)
    return Case(
        "experts_up",
        {"D": d, "EXPERTS": experts, "TOP": top, "F": f, "EPS": EPS},
        {"rows": 1},
        {
            "x": x,
            "gamma": gamma,
            "logits": logits,
            "weight": w,
            "ids": (top,),
            "shares": (top + 1,),
            "h": (top, f),
        },
        {
            "shares": (shares, False),
            "ids": (ids, False),
            "h": (np.stack([oracle.gated(gate[i], up[i], y) for i in ids]), True),
        },
        precision,
        {"weight": weight_bytes(w, top)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2048, 256, 8, 6, 4, False),
        (64, 40, 40, 3, [4, 8], True),
        (64, 1, 1, 1, 16, False),
        (128, 70, 5, 9, [8, 8], True),
    ],
)
def test_experts_up(precision: str, shape: Any) -> None:
    case = experts_up(precision, *shape)
    got = check(case)
    assert np.array_equal(got["ids"], case.expected["ids"][0])


def test_experts_up_stays_inside_when_logits_are_not_numbers() -> None:
    case = experts_up("float32", 64, 9, 8, 8, 4)
    case.slots["logits"] = np.full(10, np.nan, np.float32)
    case.slots["logits"][4] = 1.0
    case.expected = {}
    ids = check(case)["ids"]
    assert len(set(ids.tolist())) == 8
    assert ids.max() < 9


def experts_down_add(
    precision: str, d: int, experts: int, top: int, f: int, shared: int, bits: Any
) -> Case:
    rng = np.random.default_rng(d + experts + f)
    h = rounded(normals(rng, top, f), precision)
    shared_h = rounded(normals(rng, shared), precision)
    ids = rng.permutation(experts)[:top].astype(np.uint32)
    shares, x = rng.uniform(0, 1, top + 1).astype(np.float32), normals(rng, d)
    w = random_weight(rng, [(d, f)], bits[0], experts)
    ws = random_weight(rng, [(d, shared)], bits[1])
    down = w.matrix.reshape(experts, d, f)
    expected = x + shares[top] * (ws.matrix @ shared_h)
    for i, expert in enumerate(ids):
        expected = expected + shares[i] * (down[expert] @ h[i])
    return Case(
        "experts_down_add",
        {"D": d, "TOP": top, "F": f, "SHARED": shared},
        {"rows": 1},
        {
            "h": h,
            "shared": shared_h,
            "ids": ids,
            "shares": shares,
            "weight": w,
            "shared_weight": ws,
            "x": x,
        },
        {"x": (expected, False)},
        precision,
        {"weight": weight_bytes(w, top), "shared_weight": weight_bytes(ws)},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (50, 20, 8, 512, 512, [4, 4]),
        (7, 3, 3, 64, 128, [8, 16]),
        (1, 1, 1, 192, 64, [16, 8]),
        (33, 12, 11, 576, 64, [4, 8]),
    ],
)
def test_experts_down_add(precision: str, shape: Any) -> None:
    check(experts_down_add(precision, *shape))


# Sampling.


def sample_greedy(maxima: int = 300, winner: int = 7, bits: int = 4) -> Case:
    w = random_weight(np.random.default_rng(3), [(40, 704)], bits)
    values = np.full(maxima, -np.inf, np.float32)
    ids = np.full(maxima, 0xFFFFFFFF, np.uint32)
    if winner < 40:
        values[-3:], ids[-3:] = 5, 39
        ids[-min(2, maxima)] = winner
    x = w.matrix[winner] if winner < 40 else np.zeros(704)
    return Case(
        "sample_greedy",
        {"D": 704, "MAXIMA": maxima},
        {"slot": 1},
        {
            "maxima": np.stack([values.view(np.uint32), ids], 1),
            "embedding": w,
            "tokens": np.array([77, 77], np.uint32),
            "x": (704,),
        },
        {"tokens": (np.array([77, winner]), False), "x": (x, False)},
    )


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("maxima", [1, 3, 2048])
@pytest.mark.parametrize("winner", [7, 39, 0xFFFFFFFF])
def test_sample_greedy(bits: int, maxima: int, winner: int) -> None:
    case = sample_greedy(maxima, winner, bits)
    got = check(case)
    assert got["tokens"].tolist() == [77, winner]
    assert np.array_equal(got["x"], case.expected["x"][0].astype(np.float32))


# Gated delta net.


def delta_step(
    precision: str, key_heads: int, group: int, dk: int, dv: int, partials: int, position: int
) -> Case:
    heads = key_heads * group
    channels = 2 * key_heads * dk + heads * dv
    rng = np.random.default_rng(dk + dv)
    ring = rounded(normals(rng, 4, channels), precision)
    conv, gamma = normals(rng, channels, 4) * 0.5, normals(rng, dv)
    z = rounded(normals(rng, heads, dv), precision)
    gates = normals(rng, 2, heads) * 3
    decay = np.stack([-rng.uniform(0.01, 8, heads), rng.uniform(-5, 3, heads)]).astype(np.float32)
    state = normals(rng, heads, dv, dk)
    after, u, _ = oracle.delta_step(ring, conv, z, gates, decay, gamma, state, position, key_heads)
    with np.errstate(divide="ignore", invalid="ignore"):
        o = u / (gamma * oracle.silu(z.astype(np.float64)))
    return Case(
        "delta_step",
        {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "PARTIALS": partials},
        {"position": position},
        {
            "ring": ring,
            "conv": conv,
            "z": z,
            "gates": gates,
            "decay": decay,
            "gamma": gamma,
            "state_in": state,
            "state_out": state.shape,
            "u": (heads, dv),
            "squares": (heads, partials),
        },
        {
            "u": (u, True),
            "state_out": (after, False),
            "squares": (np.sum(o.reshape(heads, partials, -1) ** 2, -1), False),
        },
        precision,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 128, 128, 4, 6),
        (1, 3, 32, 32, 32, 0),
        (1, 1, 96, 160, 1, 1),
        (3, 1, 256, 64, 2, 3),
        (1, 8, 64, 256, 1, 9),
    ],
)
def test_delta_step(precision: str, shape: Any) -> None:
    case = delta_step(precision, *shape)
    got = check(case)
    # All inputs are exact and the arithmetic is float32 in both builds.
    for name in ("state_out", "squares"):
        assert relative_rms(got[name], case.expected[name][0]) < 1e-5


# Attention.


def attend(
    precision: str,
    kv_heads: int,
    group: int,
    dh: int,
    rotary: int,
    position: int,
    block: int | None,
    **constants: int,
) -> Case:
    heads, capacity = kv_heads * group, position + 3
    rng = np.random.default_rng(dh + position)
    qkv = rounded(normals(rng, 2 * (heads + kv_heads) * dh), precision)
    q_norm, k_norm = normals(rng, dh), normals(rng, dh)
    frequencies = (10.0 ** -np.linspace(0, 5, rotary // 2)).astype(np.float32)
    keys = rounded(normals(rng, kv_heads, capacity, dh), precision)
    values = rounded(normals(rng, kv_heads, capacity, dh), precision)
    blocks = -(-(position + 1) // block) if block else 1
    q, gate, k, v = oracle.split_qkv(qkv.astype(np.float64), heads, kv_heads, dh)
    (f,) = oracle.f64(frequencies)
    q = oracle.rotate(oracle.norm(q, q_norm, EPS), position, f)
    k = oracle.rotate(oracle.norm(k, k_norm, EPS), position, f)
    all_keys, all_values = keys.astype(np.float64), values.astype(np.float64)
    all_keys[:, position], all_values[:, position] = rounded(k, precision), v
    seen = slice(0, position + 1)
    expected = {"keys": (all_keys, True), "values": (all_values, True)}
    outputs: dict[str, Any] = {"u": (heads, dh)}
    if block:
        outputs = {"partial": (blocks, heads, dh), "extent": (blocks, heads, 2)}
        partial, extent = [], []
        for b in range(blocks):
            some = slice(b * block, min((b + 1) * block, position + 1))
            ks, vs = (np.repeat(a[:, some], group, 0) for a in (all_keys, all_values))
            scores = np.einsum("hd,htd->ht", q, ks) * dh**-0.5
            top = scores.max(1)
            weights = np.exp(scores - top[:, None])
            partial.append(np.einsum("ht,htd->hd", weights, vs))
            extent.append(np.stack([top, weights.sum(1)], 1))
        expected |= {"partial": (np.stack(partial), False), "extent": (np.stack(extent), False)}
    else:
        expected["u"] = (oracle.attend(q, gate, all_keys[:, seen], all_values[:, seen]), True)
    return Case(
        "attend",
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DH": dh,
            "ROTARY": rotary,
            "MERGE": int(block is not None),
            "EPS": EPS,
            **constants,
        },
        {"position": position, "capacity": capacity, "block": block or 0, "blocks": blocks},
        {
            "qkv": qkv,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "frequencies": frequencies,
            "keys": keys,
            "values": values,
            **outputs,
        },
        expected,
        precision,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 8, 256, 64, 127, None),
        (2, 8, 256, 64, 130, 128),
        (1, 1, 32, 8, 0, None),
        (1, 1, 32, 32, 0, 64),
        (3, 3, 96, 10, 5, 2),
        (1, 6, 128, 128, 70, 33),
        (1, 5, 64, 2, 33, None),
        (1, 2, 160, 40, 4, 4),
        (1, 2, 32, 16, 300, 1),
    ],
)
def test_attend(precision: str, shape: Any) -> None:
    check(attend(precision, *shape))


@pytest.mark.parametrize("constants", [{"BY_KEY": 1}, {"APART": 1}])
def test_attend_without_a_technique(constants: dict[str, int]) -> None:
    check(attend("fast", 2, 3, 96, 32, 700, 333, **constants))
    check(attend("float32", 1, 5, 32, 32, 40, None, **constants))


def test_attend_with_queries_and_cache_prepared() -> None:
    for precision, shape in (("fast", (2, 3, 64, 64, 70, 33)), ("float32", (1, 2, 32, 8, 9, None))):
        case = attend(precision, *shape, PREPARED=1)
        kv_heads, group, dh, _, position, _ = shape
        q = oracle.split_qkv(case.slots["qkv"], kv_heads * group, kv_heads, dh)[0]
        (f,) = oracle.f64(case.slots.pop("frequencies"))
        q = oracle.rotate(oracle.norm(q, case.slots.pop("q_norm"), EPS), position, f) * dh**-0.5
        del case.slots["k_norm"]
        case.slots["q"] = rounded(q, precision)
        for name in ("keys", "values"):
            case.slots[name] = rounded(case.expected[name][0], precision)
        check(case)


@pytest.mark.parametrize(
    ("precision", "shape", "constants"),
    [
        ("fast", (2, 8, 256, 64, 130, None), {}),
        ("float32", (2, 8, 256, 64, 130, 128), {}),
        ("fast", (3, 2, 96, 32, 70, 33), {"BY_KEY": 1}),
        ("float32", (1, 6, 32, 8, 0, None), {"APART": 1}),
    ],
)
def test_attend_over_an_int8_cache(precision: str, shape: Any, constants: dict[str, int]) -> None:
    kv_heads, group, dh, _, position, _ = shape
    case = attend(precision, *shape, KV_INT8=1, **constants)
    rows = {
        name: case.expected.pop(name)[0][:, position : position + 1] for name in ("keys", "values")
    }
    case.expected.clear()
    cache_shape = case.slots["keys"].shape
    for name in rows:
        case.slots[name] = to_int8(case.slots[name])
    q, gate, k, v = oracle.split_qkv(
        case.slots["qkv"].astype(np.float64), kv_heads * group, kv_heads, dh
    )
    (f,) = oracle.f64(case.slots["frequencies"])
    q, k = (
        oracle.rotate(oracle.norm(a, case.slots[name], EPS), position, f)
        for a, name in ((q, "q_norm"), (k, "k_norm"))
    )
    for order in ORDERS:
        got = check(case, [order])
        check_new_rows(got["keys"], case.slots["keys"], k[:, None], position)
        check_new_rows(got["values"], case.slots["values"], v[:, None], position)
        seen = [from_int8(got[name], cache_shape)[:, : position + 1] for name in rows]
        u = oracle.attend(q, gate, *seen)
        if case.constants["MERGE"]:
            weights = np.exp(got["extent"][..., 0] - got["extent"][..., 0].max(0))[..., None]
            found = (weights * got["partial"]).sum(0) / (
                weights[..., 0] * got["extent"][..., 1]
            ).sum(0)[:, None]
            assert relative_rms(found * oracle.sigmoid(gate), u) < 1e-5
        else:
            got.expect("u", u, act=True)


def attend_merge(precision: str, heads: int, dh: int, blocks: int) -> Case:
    rng = np.random.default_rng(heads + dh)
    partial, qkv = normals(rng, blocks, heads, dh), normals(rng, 2 * heads * dh + 2 * dh)
    qkv = rounded(qkv, precision)
    extent = np.stack(
        [normals(rng, blocks, heads) * 5, rng.uniform(1, 90, (blocks, heads))], -1
    ).astype(np.float32)
    _, gate, _, _ = oracle.split_qkv(qkv.astype(np.float64), heads, 1, dh)
    weights = np.exp(extent[..., 0].astype(np.float64) - extent[..., 0].max(0))
    u = (weights[..., None] * partial).sum(0) / (weights * extent[..., 1]).sum(0)[:, None]
    return Case(
        "attend_merge",
        {"HEADS": heads, "DH": dh},
        {"blocks": blocks},
        {"partial": partial, "extent": extent, "qkv": qkv, "u": (heads, dh)},
        {"u": (u * oracle.sigmoid(gate), True)},
        precision,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(16, 256, 33), (1, 32, 1), (3, 96, 7), (2, 160, 301)])
def test_attend_merge(precision: str, shape: Any) -> None:
    check(attend_merge(precision, *shape))


OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}
NO_TOKEN = 0xFFFFFFFF


def sample(logits: Any, *, valid: int | None = None, **options: Any) -> Case:
    """`bias` is a list of ids and numbers, `counts` turns penalties on."""
    logits = np.asarray(logits, np.float32)
    v = len(logits)
    bias = options.pop("bias", [])
    counts = options.pop("counts", None)
    w = random_weight(np.random.default_rng(0), [(v, 64)], options.pop("bits", 4))
    return Case(
        "sample",
        {
            "D": 64,
            "V": v,
            "VALID": v if valid is None else valid,
            "PENALTIES": int(counts is not None),
        },
        OFF | {"n_bias": len(bias), "slot": 1} | options,
        {
            "logits": logits,
            "embedding": w,
            "bias_ids": np.array([i for i, _ in bias] + [0], np.uint32),
            "bias": np.array([b for _, b in bias] + [0], np.float32),
            "counts": counts,
            "adjusted": (v,),
            "tokens": np.array([77, 77], np.uint32),
            "x": (64,),
        },
        {},
    )


def drawn(case: Case, orders: Sequence[Order] = ("in_turn",), isa: str = "metal plain") -> int:
    """The token, checked against the CPU device."""
    cpu = run(case.op, case.constants, case.params, **case.slots)
    got = check(case, orders, isa)
    token = int(got["tokens"][1])
    assert token == cpu["tokens"][1]
    assert got["tokens"][0] == 77
    row = case.slots["embedding"].matrix[token] if token != NO_TOKEN else np.zeros(64)
    assert np.array_equal(got["x"], row.astype(np.float32))
    if case.slots["counts"] is not None:
        assert np.array_equal(got["counts"], cpu["counts"])
    return token


LOGITS = np.array([1.0, 3.0, 3.0, -2.0, 0.5], np.float32)
SEEN = np.array([0, 0x80000005, 0x80000000, 3, 0], np.uint32)
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "bias": [(3, 10.0), (1, -np.inf)]},
    {"bias": [(3, 10.0), (3, -4.0), (77, 9.0)], "counts": SEEN, "presence": 0.5, "frequency": 0.3},
    {"counts": SEEN, "repetition": 1.5, "top_k": 3},
    {"top_p": 0.0},
    {"top_p": 0.7},
    {"top_k": 2, "top_p": 0.9, "min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.3, "valid": 4},
    {"temperature": 1e-3, "valid": 3},
]


@pytest.mark.parametrize("options", SAMPLING)
def test_sample_is_clean(options: dict[str, Any]) -> None:
    drawn(sample(LOGITS, seed=5, step=9, **options), ORDERS, "metal")


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_without_numbers(value: float, temperature: float) -> None:
    drawn(sample(np.full(5, value), temperature=temperature), ORDERS, "metal")
    drawn(sample([np.nan, 1.0, value, 2.0, value], temperature=temperature), ORDERS, "metal")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_p": 0.05},
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.95},
        {"top_p": 0.8},
        {"top_k": 2500},
        {"top_k": 2500, "top_p": 0.9, "min_p": 0.01},
        {"top_k": 10**6},
        {"top_p": 0.999, "temperature": 50.0},
        {"top_k": 2000, "temperature": 1e-2},
    ],
)
@pytest.mark.parametrize("kind", ["normal", "flat", "ties"])
def test_sample_draws_what_the_cpu_draws(kind: str, options: dict[str, Any]) -> None:
    """More tokens than threads: lists, halved ranges, ranks among equals."""
    rng = np.random.default_rng(8)
    logits = normals(rng, 3000) * 3
    if kind == "flat":
        logits = np.zeros(3000, np.float32)
    if kind == "ties":
        logits = np.round(logits / 4)
    drawn(sample(logits, seed=1, step=0, **options), ("ahead",), "metal")
    for step in range(1, 12):
        drawn(sample(logits, seed=1, step=step, **options))


@pytest.mark.parametrize("n_allowed", [0, 1, 40, 2999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_under_a_mask_with_an_entry_for_each_token(
    n_allowed: int, temperature: float
) -> None:
    rng = np.random.default_rng(n_allowed)
    allowed = set(rng.permutation(3000)[:n_allowed].tolist())
    mask = [(i, 0.0 if i in allowed else -np.inf) for i in range(3000)]
    token = drawn(sample(normals(rng, 3000) * 3, bias=mask, temperature=temperature, seed=1))
    assert token in allowed if allowed else token == NO_TOKEN


# The released model's widths, with few experts and a short vocabulary.


@pytest.mark.parametrize("precision", WIDE_PRECISIONS)
@pytest.mark.parametrize(
    "make",
    [
        lambda precision: delta_project(precision, 2048, 8192, 4096, 32, 4),
        lambda precision: delta_step(precision, 16, 2, 128, 128, 4, 5),
        lambda precision: project_add(precision, 32, 128, 4, True, 2048, 4),
        lambda precision: attend_project(precision, 2048, (8192, 512, 512), 4),
        lambda precision: attend(precision, 2, 8, 256, 64, 1030, 128),
        lambda precision: attend_merge(precision, 16, 256, 9),
        lambda precision: route_shared(precision, 2048, 256, 512, [8, 8, 4, 4]),
        lambda precision: experts_up(precision, 2048, 20, 8, 512, 4),
        lambda precision: experts_down_add(precision, 2048, 20, 8, 512, 512, [4, 4]),
        lambda precision: head(precision, 2048, 6000, 5990, True, 46, 4),
    ],
)
def test_real_widths(make: Callable[[str], Case], precision: str) -> None:
    check(make(precision), ["ahead"])


# Each barrier is needed. Sources without one are run by themselves: the device knows none of them.


@dataclass
class Barriers:
    count: int
    cases: list[Callable[[], Case]]
    groups: tuple[int, int]
    threads: int


# Of one length with those below, so that each source compiles once.
FEW = np.concatenate([LOGITS, np.full(1100 - len(LOGITS), -100.0)])

BARRIERS = {
    "delta_step": Barriers(2, [lambda: delta_step("fast", 1, 1, 64, 64, 1, 6)], (1, 1), 256),
    "attend": Barriers(
        6,
        [
            lambda: attend("fast", 1, 2, 32, 16, 9, None),
            lambda: attend("fast", 1, 1, 64, 64, 40, 41),
        ],
        (1, 1),
        256,
    ),
    "attend_merge": Barriers(1, [lambda: attend_merge("fast", 1, 32, 5)], (1, 1), 256),
    "head": Barriers(1, [lambda: head("fast", 64, 40, 40, True, 1, 4)], (1, 1), 256),
    "sample_greedy": Barriers(1, [sample_greedy], (1, 1), 256),
    "sample": Barriers(
        13,
        [
            lambda: sample(FEW, bias=[(1, 1.0), (3, 1.0), (2, 1.0)]),
            lambda: sample(FEW, top_k=2, top_p=0.8, min_p=0.1),
            lambda: sample(np.zeros(1100), min_p=0.5),
            lambda: sample(np.linspace(-3, 0, 1100), top_p=0.9, top_k=1050),
        ],
        (1, 1),
        1024,
    ),
}


def flattened(name: str, seen: set[str]) -> str:
    """A source with lily's own headers in place of their includes."""
    if name in seen:
        return ""
    seen.add(name)
    text = (METAL / name).read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(.*)"$', lambda m: flattened(m[1], seen), text, flags=re.M)


def defines(case: Case) -> dict[str, str]:
    prefix = "".join(word.capitalize() for word in case.op.split("_"))
    found = {"ACT": "float" if case.precision == "float32" else "bfloat"}
    for name, value in all_constants(case.op, case.constants).items():
        found[f"{prefix}_{name}"] = f"{value!r}f" if isinstance(value, float) else f"{value}u"
    for name, value in case.slots.items():
        if isinstance(value, Weight):  # one matrix of 4 bits
            rows, cols = value.matrix.shape
            affine = -(-rows * cols // 2 // 256) * 256
            found[f"{prefix}_{name}_PARTS(P)"] = f"P(0u, {rows}u, 4u, 0u, {affine}u)"
            found[f"{prefix}_{name}_N_PARTS"] = "1u"
            found[f"{prefix}_{name}_COLS"] = f"{cols}u"
            found[f"{prefix}_{name}_EXPERT_BYTES"] = "0ul"
    return found


def params(case: Case) -> bytes:
    fields = params_fields(case.op)
    form = "".join(code for _, code in fields)
    return struct.pack(form, *(case.params.get(name, 0) for name, _ in fields))


def reports(case: Case, source: str, how: Barriers) -> list[Any]:
    """What the detector says of another source for a case's kernel."""
    library = Library.compile(source, mode="detect", name=f"{case.op}.metal", defines=defines(case))
    buffers: dict[int, Any] = {0: np.frombuffer(params(case), np.uint8)}
    for number, (name, kind, access, _) in enumerate(CONTRACTS[case.op]["slots"], 1):
        value = case.slots.get(name)
        dtype = np.dtype(np.uint8) if kind == "packed" else storage(kind, case.precision)
        if value is None:
            buffers[number] = Slot(np.zeros(256, np.uint8))
        elif isinstance(value, Weight):
            buffers[number] = read(np.frombuffer(value.on("metal").bytes, np.uint8))
        elif access == "write":
            array = np.full(value, POISON[dtype], dtype)
            buffers[number] = Slot(array, (0, array.nbytes), (0, array.nbytes))
        else:
            array = encode(value, dtype).copy()
            written = array.nbytes if access == "update" else 0
            buffers[number] = Slot(array, (0, array.nbytes), (0, written))
    done = library.run(
        case.op, groups=how.groups, threads=how.threads, buffers=buffers, order="ahead", seed=1
    )
    return done.reports


@pytest.mark.parametrize("op", BARRIERS)
def test_each_barrier_is_missed(op: str) -> None:
    how = BARRIERS[op]
    cases = [make() for make in how.cases]
    whole = flattened(f"{op}.metal", set())
    assert not any(reports(case, whole, how) for case in cases)
    mutants = list(without_each_barrier(whole))
    assert len(mutants) == how.count
    silent = [line for line, m in mutants if not any(reports(case, m, how) for case in cases)]
    assert not silent
