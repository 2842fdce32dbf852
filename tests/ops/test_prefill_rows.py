"""Norms, the router's choice, grouping and combining against their formulas, in both builds and on
every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import oracle_rows
import pytest
from harness import PRECISIONS, Result, assert_close32, isas, normals, rounded, run
from hypothesis import given, settings
from hypothesis import strategies as st

EPS = 1e-6

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]
builds = pytest.mark.parametrize(("precision", "isa"), BUILDS)

ROWS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])


# Norms.


def norm(x: Any, gamma: Any, precision: str, isa: str, threads: int = 1) -> Result:
    constants = {"D": x.shape[1], "EPS": EPS}
    at = {"rows": len(x)}
    return run(
        "prefill_norm",
        constants,
        at,
        precision,
        isa=isa,
        threads=threads,
        x=x,
        gamma=gamma,
        y=x.shape,
    )


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    rows=ROWS,
    d=st.integers(1, 40).map(lambda n: 64 * n),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e15]),
    seed=SEEDS,
    threads=THREADS,
)
def test_norm(
    build: tuple[str, str], rows: int, d: int, size: float, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    x, gamma = normals(rng, rows, d) * np.float32(size), normals(rng, d)
    got = norm(x, gamma, *build, threads)
    got.expect("y", oracle.norm(x, gamma, EPS), act=True)


@builds
def test_a_row_of_zeros_is_normed_to_zeros(precision: str, isa: str) -> None:
    got = norm(np.zeros((1, 64), np.float32), np.ones(64, np.float32), precision, isa)
    assert np.array_equal(got["y"], np.zeros((1, 64)))


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    rows=ROWS,
    heads=st.integers(1, 8),
    dv=st.sampled_from([32, 64, 96, 128, 256]),
    size=st.sampled_from([1e-12, 1.0, 1e15]),
    seed=SEEDS,
    threads=THREADS,
)
def test_gated_norm(
    build: tuple[str, str], rows: int, heads: int, dv: int, size: float, seed: int, threads: int
) -> None:
    precision, isa = build
    rng = np.random.default_rng(seed)
    o, gamma = normals(rng, rows, heads, dv) * np.float32(size), normals(rng, dv)
    z = rounded(normals(rng, rows, heads, dv) * 4, precision)
    got = run(
        "prefill_gated_norm",
        {"HEADS": heads, "DV": dv, "EPS": EPS},
        {"rows": rows},
        precision,
        isa=isa,
        threads=threads,
        o=o,
        z=z,
        gamma=gamma,
        u=o.shape,
    )
    got.expect("u", oracle_rows.gated_norm(o, z, gamma, EPS), act=True)


@pytest.mark.parametrize("isa", isas())
def test_a_gate_of_any_size_is_finite(isa: str) -> None:
    z = np.array([-1e20, -1e3, -90, 0, 90, 1e3, 3e18, 0], np.float32).repeat(4)
    o = np.ones((1, 1, 32), np.float32)
    constants = {"HEADS": 1, "DV": 32, "EPS": EPS}
    at = {"rows": 1}
    got = run(
        "prefill_gated_norm", constants, at, isa=isa, o=o, z=z[None, None], gamma=o[0, 0], u=o.shape
    )
    expected = np.where(z > 0, z, 0)
    assert np.allclose(got["u"][0, 0], expected, rtol=1e-6, atol=1e-18)


# The router's choice.


def topk(logits: Any, top: int, isa: str, threads: int = 1) -> Result:
    rows, experts = len(logits), logits.shape[1] - 1
    return run(
        "prefill_topk",
        {"EXPERTS": experts, "TOP": top},
        {"rows": rows},
        isa=isa,
        threads=threads,
        logits=logits,
        ids=(rows, top),
        shares=(rows, top + 1),
    )


@settings(max_examples=40, deadline=None)
@given(
    isa=st.sampled_from(isas()),
    rows=ROWS,
    experts=st.integers(1, 300),
    top=st.integers(1, 12),
    levels=st.sampled_from([0, 2, 5, 40]),
    seed=SEEDS,
    threads=THREADS,
)
def test_topk(
    isa: str, rows: int, experts: int, top: int, levels: int, seed: int, threads: int
) -> None:
    top = min(top, experts)
    rng = np.random.default_rng(seed)
    logits = normals(rng, rows, experts + 1) * 3
    if levels:  # many ties
        logits = rng.integers(0, levels, logits.shape).astype(np.float32)
    got = topk(logits, top, isa, threads)
    ids, shares = oracle_rows.route(logits, experts, top)
    assert np.array_equal(got["ids"], ids)
    assert_close32(got["shares"], shares, 1e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("places", [slice(None), slice(0, 3), slice(5, 6)])
def test_topk_names_experts_whatever_the_logits(isa: str, value: float, places: slice) -> None:
    logits = normals(np.random.default_rng(0), 2, 17)
    logits[0, places] = value
    got = topk(logits, 4, isa)
    assert len(set(got["ids"][0])) == 4
    assert np.all(got["ids"] < 16)
    ids, shares = oracle_rows.route(logits[1:], 16, 4)
    assert np.array_equal(got["ids"][1:], ids), "a row disturbs another"
    assert_close32(got["shares"][1:], shares, 1e-6)


# Grouping.


def scatter(ids: Any, experts: int, isa: str = "") -> Result:
    rows, top = ids.shape
    return run(
        "prefill_scatter",
        {"EXPERTS": experts, "TOP": top},
        {"rows": rows},
        isa=isa,
        ids=ids,
        offsets=(experts + 1,),
        src=(rows * top,),
        inv=(rows, top),
    )


def check_scatter(ids: Any, experts: int, isa: str = "") -> None:
    got = scatter(ids, experts, isa)
    for name, expected in zip(
        ("offsets", "src", "inv"), oracle_rows.group(ids, experts), strict=True
    ):
        assert np.array_equal(got[name], expected), name


@settings(max_examples=30, deadline=None)
@given(
    isa=st.sampled_from(isas()),
    rows=st.integers(1, 130),
    experts=st.integers(1, 300),
    top=st.integers(1, 8),
    seed=SEEDS,
)
def test_scatter(isa: str, rows: int, experts: int, top: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    top = min(top, experts)
    ids = np.stack([rng.permutation(experts)[:top] for _ in range(rows)]).astype(np.uint32)
    check_scatter(ids, experts, isa)


def test_scatter_to_one_expert_and_to_the_last() -> None:
    check_scatter(np.zeros((9, 1), np.uint32), 5)
    check_scatter(np.full((9, 1), 4, np.uint32), 5)


def test_scatter_of_more_rows_than_16_bits_hold() -> None:
    ids = np.random.default_rng(0).integers(0, 256, (9000, 8), dtype=np.uint32)
    check_scatter(ids, 256)


# Combining.


def combine(
    x: Any, out: Any, shared_out: Any, inv: Any, shares: Any, precision: str, isa: str, threads: int
) -> Result:
    return run(
        "prefill_combine",
        {"D": x.shape[1], "TOP": inv.shape[1], "GROUPED": 1},
        {"rows": len(x)},
        precision,
        isa=isa,
        threads=threads,
        out=out,
        shared_out=shared_out,
        inv=inv,
        shares=shares,
        x=x,
    )


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    rows=ROWS,
    d=st.integers(1, 9).map(lambda n: 64 * n),
    top=st.integers(1, 9),
    seed=SEEDS,
    threads=THREADS,
)
def test_combine(
    build: tuple[str, str], rows: int, d: int, top: int, seed: int, threads: int
) -> None:
    precision, isa = build
    rng = np.random.default_rng(seed)
    x = normals(rng, rows, d)
    out = rounded(normals(rng, rows * top, d), precision)
    shared_out = rounded(normals(rng, rows, d), precision)
    inv = rng.permutation(rows * top).reshape(rows, top).astype(np.uint32)
    shares = rng.uniform(0, 1, (rows, top + 1)).astype(np.float32)
    got = combine(x, out, shared_out, inv, shares, precision, isa, threads)
    got.expect("x", oracle_rows.combine(x, out, shared_out, inv, shares))
    t = rows - 1
    alone = combine(x[t:], out, shared_out[t:], inv[t:], shares[t:], precision, isa, 1)
    assert np.array_equal(alone["x"][0], got["x"][t])
