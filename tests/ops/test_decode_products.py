"""Decode's products of weights with a vector, against their formulas in float64, in both builds and
on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from harness import (
    PRECISIONS,
    RawSegment,
    Weight,
    isas,
    normals,
    pack,
    random_weight,
    relative_rms,
    rounded,
    run,
    to_bf16,
)
from hypothesis import given, settings
from hypothesis import strategies as st

EPS = 1e-6

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]
builds = pytest.mark.parametrize(("precision", "isa"), BUILDS)

# Rows that fill no block of 16, one group of columns, an odd number of groups, widths in a mix.
ROWS = st.integers(1, 70)
COLS = st.integers(1, 9).map(lambda groups: 64 * groups)
BITS = st.sampled_from([4, 8, 16])
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])


def packed_bytes(weight: Weight, experts: int = 1) -> int:
    return (len(weight.packed.bytes) - 256) // experts


# Projections.


def check_delta_project(
    precision: str,
    isa: str,
    *,
    d: int,
    channels: int,
    values: int,
    heads: int,
    bits: list[int],
    position: int,
    seed: int,
    threads: int = 1,
) -> None:
    rng = np.random.default_rng(seed)
    x, gamma = normals(rng, d) * 3, normals(rng, d)
    w = random_weight(rng, [(channels, d), (values, d), (heads, d), (heads, d)], bits)
    ring = rounded(normals(rng, 4, channels), precision)
    got = run(
        "delta_project",
        {"D": d, "CHANNELS": channels, "VALUES": values, "HEADS": heads, "EPS": EPS},
        {"position": position},
        precision,
        isa=isa,
        threads=threads,
        x=x,
        gamma=gamma,
        weight=w,
        ring=ring,
        z=(values,),
        gates=(2, heads),
    )
    y = oracle.norm(x, gamma, EPS)
    expected = ring.astype(np.float64)
    expected[position & 3] = w.matrices[0] @ y
    got.expect("ring", expected, act=True)
    others = [slot for slot in range(4) if slot != position & 3]
    assert np.array_equal(got["ring"][others], ring[others])
    got.expect("z", w.matrices[1] @ y, act=True)
    got.expect("gates", np.stack([w.matrices[2] @ y, w.matrices[3] @ y]))
    assert got.weight_bytes == packed_bytes(w)


@builds
def test_delta_project(precision: str, isa: str) -> None:
    check_delta_project(
        precision, isa, d=512, channels=384, values=128, heads=4, bits=[4] * 4, position=6, seed=1
    )


@settings(max_examples=25, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=COLS,
    channels=ROWS,
    values=ROWS,
    heads=st.integers(1, 20),
    bits=st.lists(BITS, min_size=4, max_size=4),
    position=st.integers(0, 9),
    seed=SEEDS,
    threads=THREADS,
)
def test_delta_project_of_any_shape(build: tuple[str, str], **shape: Any) -> None:
    check_delta_project(*build, **shape)


@settings(max_examples=20, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=COLS,
    rows=st.tuples(ROWS, ROWS, ROWS),
    bits=st.lists(BITS, min_size=3, max_size=3),
    seed=SEEDS,
)
def test_attend_project(
    build: tuple[str, str], d: int, rows: tuple[int, int, int], bits: list[int], seed: int
) -> None:
    precision, isa = build
    rng = np.random.default_rng(seed)
    x, gamma = normals(rng, d), normals(rng, d)
    w = random_weight(rng, [(r, d) for r in rows], bits)
    got = run(
        "attend_project",
        {"D": d, "N": sum(rows), "EPS": EPS},
        {"rows": 1},
        precision,
        isa=isa,
        x=x,
        gamma=gamma,
        weight=w,
        qkv=(sum(rows),),
    )
    got.expect("qkv", w.matrix @ oracle.norm(x, gamma, EPS), act=True)
    assert got.weight_bytes == packed_bytes(w)


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    width=st.sampled_from([32, 64, 96, 128]),
    heads=st.integers(1, 6),
    normed=st.booleans(),
    partials=st.integers(1, 3),
    n=ROWS,
    bits=BITS,
    seed=SEEDS,
)
def test_project_add(
    build: tuple[str, str],
    width: int,
    heads: int,
    normed: bool,
    partials: int,
    n: int,
    bits: int,
    seed: int,
) -> None:
    precision, isa = build
    heads *= 2  # so that K is a multiple of 64
    rng = np.random.default_rng(seed)
    u = rounded(normals(rng, heads, width), precision)
    squares, x = rng.uniform(0, width, (heads, partials)).astype(np.float32), normals(rng, n)
    w = random_weight(rng, [(n, heads * width)], bits)
    got = run(
        "project_add",
        {
            "K": heads * width,
            "N": n,
            "HEADS": heads if normed else 0,
            "PARTIALS": partials,
            "EPS": EPS,
        },
        {"rows": 1},
        precision,
        isa=isa,
        u=u,
        squares=squares if normed else None,
        weight=w,
        x=x,
    )
    r = oracle.head_scales(squares, width, EPS)[:, None] if normed else 1.0
    got.expect("x", x + w.matrix @ (u.astype(np.float64) * r).ravel())
    assert got.weight_bytes == packed_bytes(w)


@pytest.mark.parametrize("isa", isas())
def test_project_add_by_hand(isa: str) -> None:
    # Every code is 2, scale 1/2, bias -3/4: each weight is 1/4, so y = Σu / 4.
    w = pack(
        [
            RawSegment(
                4,
                np.full((1, 2, 8), 0x22222222, np.uint32),
                to_bf16(np.full((1, 2, 1), 0.5)),
                to_bf16(np.full((1, 2, 1), -0.75)),
                np.full((1, 2, 64), 0.25, np.float32),
            )
        ]
    )
    u = np.arange(64, dtype=np.float32)
    got = run(
        "project_add",
        {"K": 64, "N": 2, "HEADS": 0, "PARTIALS": 1, "EPS": EPS},
        {"rows": 1},
        "float32",
        isa=isa,
        u=u,
        weight=w,
        x=np.array([1.0, -4.0], np.float32),
    )
    assert got["x"].tolist() == [1.0 + 504.0, -4.0 + 504.0]


@settings(max_examples=25, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=COLS,
    experts=st.integers(1, 70),
    shared=ROWS,
    bits=st.lists(BITS, min_size=4, max_size=4),
    seed=SEEDS,
    threads=THREADS,
)
def test_route_shared(
    build: tuple[str, str],
    d: int,
    experts: int,
    shared: int,
    bits: list[int],
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    rng = np.random.default_rng(seed)
    x, gamma = normals(rng, d), normals(rng, d)
    w = random_weight(rng, [(experts, d), (1, d), (shared, d), (shared, d)], bits)
    got = run(
        "route_shared",
        {"D": d, "EXPERTS": experts, "SHARED": shared, "EPS": EPS},
        {"rows": 1},
        precision,
        isa=isa,
        threads=threads,
        x=x,
        gamma=gamma,
        weight=w,
        logits=(experts + 1,),
        shared=(shared,),
    )
    y = oracle.norm(x, gamma, EPS)
    got.expect("logits", np.concatenate(w.matrices[:2]) @ y)
    got.expect("shared", oracle.gated(w.matrices[2], w.matrices[3], y), act=True)
    assert got.weight_bytes == packed_bytes(w)


def run_head(
    x: Any, gamma: Any, w: Weight, valid: int, store: bool, row: int, precision: str, **how: Any
) -> Any:
    v, d = w.matrix.shape
    constants = {"D": d, "V": v, "VALID": valid, "STORE": int(store), "MAXIMA": 1, "EPS": EPS}
    return run(
        "head",
        constants,
        {"row": row},
        precision,
        x=x,
        gamma=gamma,
        weight=w,
        logits=(v,) if store else None,
        maxima=(1, 2),
        **how,
    )


@settings(max_examples=25, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=COLS,
    v=st.integers(1, 300),
    padding=st.integers(0, 40),
    row=st.integers(0, 2),
    store=st.booleans(),
    bits=BITS,
    seed=SEEDS,
    threads=THREADS,
)
def test_head(
    build: tuple[str, str],
    d: int,
    v: int,
    padding: int,
    row: int,
    store: bool,
    bits: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    valid = max(1, v - padding)
    rng = np.random.default_rng(seed)
    x, gamma = normals(rng, 3, d), normals(rng, d)
    w = random_weight(rng, [(v, d)], bits)
    got = run_head(x, gamma, w, valid, store, row, precision, isa=isa, threads=threads)
    logits = w.matrix @ oracle.norm(x[row], gamma, EPS)
    if store:
        got.expect("logits", logits)
    (value, index) = got["maxima"][0]
    assert logits[index] >= logits[:valid].max() - 0.02 * np.abs(logits).max()
    assert index < valid
    largest = np.array([value], np.uint32).view(np.float32)[0]
    assert largest == got["logits"][:valid].max() if store else np.isfinite(largest)
    assert got.weight_bytes == packed_bytes(w)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_head_breaks_ties_by_the_lowest_index(isa: str, threads: int) -> None:
    rows = np.zeros((1, 200, 64), np.float32)
    rows[0, [37, 90, 151]] = 1.0  # in different blocks and threads
    w = pack([RawSegment(16, to_bf16(rows), None, None, rows)])
    ones = np.ones(64, np.float32)
    got = run_head(ones, ones, w, 200, False, 0, "float32", isa=isa, threads=threads)
    assert got["maxima"][0, 1] == 37


def test_head_without_numbers_gives_no_index() -> None:
    rng = np.random.default_rng(0)
    w = random_weight(rng, [(20, 64)])
    x = np.full(64, np.nan, np.float32)
    for precision in PRECISIONS:
        got = run_head(x, np.ones(64, np.float32), w, 20, True, 0, precision)
        assert np.isnan(got["logits"]).all()
        assert got["maxima"][0, 1] == 0xFFFFFFFF


# Experts.


@settings(max_examples=25, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=COLS,
    experts=st.integers(1, 30),
    top=st.integers(1, 8),
    f=ROWS,
    bits=st.lists(BITS, min_size=2, max_size=2),
    ties=st.booleans(),
    seed=SEEDS,
    threads=THREADS,
)
def test_experts_up(
    build: tuple[str, str],
    d: int,
    experts: int,
    top: int,
    f: int,
    bits: list[int],
    ties: bool,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    top = min(top, experts)
    rng = np.random.default_rng(seed)
    x, gamma, logits = normals(rng, d), normals(rng, d), normals(rng, experts + 1) * 3
    if ties:
        logits = np.round(logits)
    w = random_weight(rng, [(f, d), (f, d)], bits, experts)
    got = run(
        "experts_up",
        {"D": d, "EXPERTS": experts, "TOP": top, "F": f, "EPS": EPS},
        {"rows": 1},
        precision,
        isa=isa,
        threads=threads,
        x=x,
        gamma=gamma,
        logits=logits,
        weight=w,
        ids=(top,),
        shares=(top + 1,),
        h=(top, f),
    )
    ids, shares = oracle.choose(logits.astype(np.float64), experts, top)
    assert np.array_equal(got["ids"], ids)
    assert relative_rms(got["shares"], shares) < 1e-6
    y = oracle.norm(x, gamma, EPS)
    gate, up = (m.reshape(experts, f, d) for m in w.matrices)
    got.expect("h", np.stack([oracle.gated(gate[i], up[i], y) for i in ids]), act=True)
    assert got.weight_bytes == top * packed_bytes(w, experts)


def test_experts_up_stays_inside_when_logits_are_not_numbers() -> None:
    rng = np.random.default_rng(0)
    w = random_weight(rng, [(8, 64), (8, 64)], 4, experts=9)
    logits = np.full(10, np.nan, np.float32)
    logits[4] = 1.0
    got = run(
        "experts_up",
        {"D": 64, "EXPERTS": 9, "TOP": 8, "F": 8, "EPS": EPS},
        {"rows": 1},
        x=normals(rng, 64),
        gamma=np.ones(64, np.float32),
        logits=logits,
        weight=w,
        ids=(8,),
        shares=(9,),
        h=(8, 8),
    )
    assert len(set(got["ids"].tolist())) == 8
    assert got["ids"].max() < 9


@settings(max_examples=25, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    d=ROWS,
    experts=st.integers(1, 20),
    top=st.integers(1, 8),
    f=st.integers(1, 5).map(lambda groups: 64 * groups),
    shared=st.integers(1, 5).map(lambda groups: 64 * groups),
    bits=st.lists(BITS, min_size=2, max_size=2),
    seed=SEEDS,
    threads=THREADS,
)
def test_experts_down_add(
    build: tuple[str, str],
    d: int,
    experts: int,
    top: int,
    f: int,
    shared: int,
    bits: list[int],
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    top = min(top, experts)
    rng = np.random.default_rng(seed)
    h = rounded(normals(rng, top, f), precision)
    shared_h = rounded(normals(rng, shared), precision)
    ids = rng.permutation(experts)[:top].astype(np.uint32)
    shares, x = rng.uniform(0, 1, top + 1).astype(np.float32), normals(rng, d)
    w = random_weight(rng, [(d, f)], bits[0], experts)
    ws = random_weight(rng, [(d, shared)], bits[1])
    got = run(
        "experts_down_add",
        {"D": d, "TOP": top, "F": f, "SHARED": shared},
        {"rows": 1},
        precision,
        isa=isa,
        threads=threads,
        h=h,
        shared=shared_h,
        ids=ids,
        shares=shares,
        weight=w,
        shared_weight=ws,
        x=x,
    )
    down = w.matrix.reshape(experts, d, f).astype(np.float64)
    expected = x + shares[top] * (ws.matrix.astype(np.float64) @ shared_h)
    for i, expert in enumerate(ids):
        expected = expected + shares[i] * (down[expert] @ h[i])
    got.expect("x", expected)
    assert got.weight_bytes == top * packed_bytes(w, experts) + packed_bytes(ws)


# What one thread gives, any number of threads gives.


@builds
def test_results_do_not_depend_on_threads(precision: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    x, gamma = normals(rng, 256), normals(rng, 256)
    w = random_weight(rng, [(40, 256), (1, 256), (64, 256), (64, 256)], [8, 8, 4, 4])
    results = [
        run(
            "route_shared",
            {"D": 256, "EXPERTS": 40, "SHARED": 64, "EPS": EPS},
            {"rows": 1},
            precision,
            isa=isa,
            threads=threads,
            x=x,
            gamma=gamma,
            weight=w,
            logits=(41,),
            shared=(64,),
        )
        for threads in (1, 2, 3, 7)
    ]
    for other in results[1:]:
        for slot in ("logits", "shared"):
            assert other[slot].tobytes() == results[0][slot].tobytes()


@pytest.mark.parametrize("isa", [isa for isa in isas() if isa != "portable"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_whole_number_products_are_nearer_than_bf16(isa: str, bits: int, outlier: float) -> None:
    """The fast build's x86 products keep 16 bits of each activation, against 8 of bf16."""
    rng = np.random.default_rng(3)
    x, gamma = normals(rng, 2048), np.ones(2048, np.float32)
    x[::97] *= outlier
    w = random_weight(rng, [(64, 2048)], bits)
    got = run_head(x, gamma, w, 64, True, 0, "fast", isa=isa)
    y = oracle.norm(x, gamma, EPS)
    kept = relative_rms(got["logits"], w.matrix @ y)
    bf16 = relative_rms(w.matrix @ rounded(y, "fast").astype(np.float64), w.matrix @ y)
    assert kept < min(1e-4, bf16 / 10)
