"""The dense projections of prefill against float64, and the promise that a row's bits depend on
nothing but the row: not on how many rows there are, where it stands, or how many threads work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle_gemm as oracle
import pytest
from harness import (
    PRECISIONS,
    RawSegment,
    Result,
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

from lily import _testing

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]
builds = pytest.mark.parametrize(("precision", "isa"), BUILDS)

# Rows around every tile size, and beyond one tile, two and four.
TOKENS = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 47, 63, 64, 65, 127, 128, 130]))
# Outputs that fill no block of 16, a block, a strip of 32 and no strip.
ROWS = st.integers(1, 70)
COLS = st.integers(1, 9).map(lambda groups: 64 * groups)
BITS = st.sampled_from([4, 8, 16])
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])


def packed_bytes(weight: Weight) -> int:
    return len(weight.packed.bytes) - 256


def delta_project(y: Any, w: Weight, precision: str, isa: str, threads: int = 1) -> Result:
    channels, values, heads, _ = (len(m) for m in w.matrices)
    return run(
        "prefill_delta_project",
        {"D": y.shape[1], "CHANNELS": channels, "VALUES": values, "HEADS": heads},
        {"rows": len(y)},
        precision,
        isa=isa,
        threads=threads,
        y=y,
        weight=w,
        qkv=(len(y), channels),
        z=(len(y), values),
        gates=(len(y), 2, heads),
    )


def attend_project(y: Any, w: Weight, precision: str, isa: str, threads: int = 1) -> Result:
    n = len(w.matrix)
    return run(
        "prefill_attend_project",
        {"D": y.shape[1], "N": n},
        {"rows": len(y)},
        precision,
        isa=isa,
        threads=threads,
        y=y,
        weight=w,
        qkv=(len(y), n),
    )


def project_add(u: Any, w: Weight, x: Any, precision: str, isa: str, threads: int = 1) -> Result:
    return run(
        "prefill_project_add",
        {"K": u.shape[1], "N": x.shape[1]},
        {"rows": len(u)},
        precision,
        isa=isa,
        threads=threads,
        u=u,
        weight=w,
        x=x,
    )


def route(y: Any, w: Weight, precision: str, isa: str, threads: int = 1) -> Result:
    experts, shared = len(w.matrices[0]), len(w.matrices[2])
    return run(
        "prefill_route",
        {"D": y.shape[1], "EXPERTS": experts, "SHARED": shared},
        {"rows": len(y)},
        precision,
        isa=isa,
        threads=threads,
        y=y,
        weight=w,
        logits=(len(y), experts + 1),
        shared=(len(y), shared),
    )


def head(y: Any, w: Weight, precision: str, isa: str, threads: int = 1) -> Result:
    return run(
        "prefill_head",
        {"D": y.shape[1], "V": len(w.matrix)},
        {"rows": len(y)},
        precision,
        isa=isa,
        threads=threads,
        y=y,
        weight=w,
        logits=(len(y), len(w.matrix)),
    )


# Numbers.


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    tokens=TOKENS,
    d=COLS,
    rows=st.tuples(ROWS, ROWS, st.integers(1, 20)),
    bits=st.lists(BITS, min_size=4, max_size=4),
    seed=SEEDS,
    threads=THREADS,
)
def test_delta_project_of_any_shape(
    build: tuple[str, str],
    tokens: int,
    d: int,
    rows: tuple[int, int, int],
    bits: list[int],
    seed: int,
    threads: int,
) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(r, d) for r in (*rows, rows[2])], bits)
    y = rounded(normals(rng, tokens, d), build[0])
    got = delta_project(y, w, *build, threads)
    qkv, z, b, a = (oracle.project(y, m) for m in w.matrices)
    got.expect("qkv", qkv, act=True)
    got.expect("z", z, act=True)
    got.expect("gates", np.stack([b, a], 1))
    assert got.weight_bytes == packed_bytes(w)


@settings(max_examples=20, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    tokens=TOKENS,
    d=COLS,
    rows=st.tuples(ROWS, ROWS, ROWS),
    bits=st.lists(BITS, min_size=3, max_size=3),
    seed=SEEDS,
)
def test_attend_project_of_any_shape(
    build: tuple[str, str], tokens: int, d: int, rows: tuple[int, ...], bits: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(r, d) for r in rows], bits)
    y = rounded(normals(rng, tokens, d), build[0])
    attend_project(y, w, *build, 2).expect("qkv", oracle.project(y, w.matrix), act=True)


@settings(max_examples=20, deadline=None)
@given(build=st.sampled_from(BUILDS), tokens=TOKENS, k=COLS, n=ROWS, bits=BITS, seed=SEEDS)
def test_project_add_of_any_shape(
    build: tuple[str, str], tokens: int, k: int, n: int, bits: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(n, k)], bits)
    u, x = rounded(normals(rng, tokens, k), build[0]), normals(rng, tokens, n)
    project_add(u, w, x, *build, 2).expect("x", x + oracle.project(u, w.matrix))


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    tokens=TOKENS,
    d=COLS,
    experts=ROWS,
    shared=ROWS,
    bits=st.lists(BITS, min_size=4, max_size=4),
    seed=SEEDS,
    threads=THREADS,
)
def test_route_of_any_shape(
    build: tuple[str, str],
    tokens: int,
    d: int,
    experts: int,
    shared: int,
    bits: list[int],
    seed: int,
    threads: int,
) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(r, d) for r in (experts, 1, shared, shared)], bits)
    y = rounded(normals(rng, tokens, d), build[0])
    got = route(y, w, *build, threads)
    router, gate, shared_gate, shared_up = w.matrices
    got.expect("logits", oracle.project(y, np.concatenate([router, gate])))
    got.expect("shared", oracle.gated(y, shared_gate, shared_up), act=True)
    assert got.weight_bytes == packed_bytes(w)


@settings(max_examples=15, deadline=None)
@given(build=st.sampled_from(BUILDS), tokens=TOKENS, d=COLS, v=st.integers(1, 300), seed=SEEDS)
def test_head_of_any_shape(build: tuple[str, str], tokens: int, d: int, v: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(v, d)])
    y = rounded(normals(rng, tokens, d), build[0])
    head(y, w, *build, 2).expect("logits", oracle.project(y, w.matrix))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", [4, 8])
def test_project_add_by_hand(isa: str, bits: int) -> None:
    # Every code is 2, scale 1/2, bias -3/4: each weight is 1/4, so x + Σu / 4.
    words = np.full((1, 2, 64 * bits // 32), 0x22222222 if bits == 4 else 0x02020202, np.uint32)
    half, bias = to_bf16(np.full((1, 2, 1), 0.5)), to_bf16(np.full((1, 2, 1), -0.75))
    w = pack([RawSegment(bits, words, half, bias, np.full((1, 2, 64), 0.25, np.float32))])
    u = np.arange(128, dtype=np.float32).reshape(2, 64)
    for precision in PRECISIONS:
        got = project_add(u, w, np.array([[10, 20], [30, 40]], np.float32), precision, isa)
        assert got["x"].tolist() == [[514, 524], [1558, 1568]]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_long_sums_stay_exact(isa: str, bits: int) -> None:
    rng = np.random.default_rng(3)
    w = random_weight(rng, [(33, 4096)], bits)
    y = rounded(normals(rng, 40, 4096), "fast")
    expected = oracle.project(y, w.matrix)
    assert relative_rms(head(y, w, "float32", isa)["logits"], expected) < 1e-6
    # No rounding of the weights to bf16, which alone would leave 1.6e-3. A group's sum of a row may
    # be two bf16: 2^-18 of each.
    assert relative_rms(head(y, w, "fast", isa)["logits"], expected) < 5e-6


@builds
def test_a_row_that_is_not_finite_stays_alone(precision: str, isa: str) -> None:
    rng = np.random.default_rng(4)
    w = random_weight(rng, [(40, 128)])
    y = normals(rng, 37, 128)
    before = head(y, w, precision, isa)["logits"]
    y[5, 7], y[20] = np.nan, np.inf
    after = head(y, w, precision, isa)["logits"]
    others = [t for t in range(37) if t not in (5, 20)]
    assert np.array_equal(before[others], after[others])
    assert np.isnan(after[5]).all()
    assert not np.isfinite(after[20]).any()


# Bits.


def outputs_of_all(
    y: Any, w: Weight, shared: Weight, x: Any, precision: str, isa: str, threads: int
) -> dict[str, Any]:
    return {
        **delta_project(y, w, precision, isa, threads).outputs,
        **route(y, shared, precision, isa, threads).outputs,
        **project_add(y, w, x, precision, isa, threads).outputs,
    }


@builds
def test_a_rows_bits_depend_on_the_row_alone(precision: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    d = 576
    w = random_weight(rng, [(70, d), (33, d), (5, d), (5, d)], [4, 16, 8, 4])
    shared = random_weight(rng, [(20, d), (1, d), (24, d), (24, d)], [8, 8, 4, 4])
    y, x = normals(rng, 130, d), normals(rng, 130, 113)

    def of(rows: slice, threads: int) -> dict[str, Any]:
        return outputs_of_all(y[rows], w, shared, x[rows], precision, isa, threads)

    whole = of(slice(None), 1)
    parts = [slice(0, n) for n in (1, 2, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 96, 129)]
    parts += [slice(t, t + 1) for t in (1, 7, 40, 129)] + [slice(3, 50), slice(17, 130)]
    for threads, part in [(2, slice(None)), (3, slice(None)), *((1, p) for p in parts)]:
        for name, values in of(part, threads).items():
            assert np.array_equal(values, whole[name][part]), (name, part, threads)


@pytest.mark.parametrize("isa", isas())
def test_a_rows_bits_do_not_depend_on_its_chunk(isa: str) -> None:
    rng = np.random.default_rng(6)
    w = random_weight(rng, [(48, 64)])
    y = normals(rng, 1100, 64)
    whole = head(y, w, "fast", isa, 2)
    assert whole.weight_bytes == 3 * packed_bytes(w), "expanded again for every 512 rows"
    for first in (0, 1, 511, 512, 700):
        part = head(y[first:], w, "fast", isa, 1)
        assert np.array_equal(part["logits"], whole["logits"][first:])


@pytest.mark.skipif("amx" not in _testing.description(1, ""), reason="this processor has no AMX")
def test_all_this_without_the_matrix_unit() -> None:
    if os.environ.get("LILY_CPU_NO_TILES"):
        pytest.skip("this is that run")
    here = Path(__file__).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            "bf16 or any_shape",
        ]
        + [str(here / f"test_prefill_{part}.py") for part in ("projections", "experts")],
        env={**os.environ, "LILY_CPU_NO_TILES": "1"},
        check=True,
    )
