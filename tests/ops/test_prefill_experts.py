"""The experts of prefill against float64, for any spread of rows over experts, and the bits of a
row, which depend on the row and its expert alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_gemm as oracle
import pytest
from harness import PRECISIONS, Result, Weight, isas, normals, random_weight, rounded, run
from hypothesis import given, settings
from hypothesis import strategies as st

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]
builds = pytest.mark.parametrize(("precision", "isa"), BUILDS)

COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=9)
ROWS = st.integers(1, 70)
COLS = st.integers(1, 9).map(lambda groups: 64 * groups)
BITS = st.sampled_from([4, 8, 16])
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])


def expert_bytes(weight: Weight, experts: int) -> int:
    return (len(weight.packed.bytes) - 256) // experts


def experts_up(
    y: Any, offsets: Any, src: Any, w: Weight, precision: str, isa: str, threads: int = 1
) -> Result:
    experts = len(offsets) - 1
    f = w.matrices[0].shape[-2]
    return run(
        "prefill_experts_up",
        {"D": y.shape[1], "EXPERTS": experts, "TOP": 1, "F": f, "TILE_ROWS": 64},
        {"rows": len(src)},
        precision,
        isa=isa,
        threads=threads,
        y=y,
        offsets=offsets,
        src=src,
        weight=w,
        h=(len(src), f),
    )


def experts_down(
    h: Any,
    shared: Any,
    offsets: Any,
    w: Weight,
    ws: Weight,
    precision: str,
    isa: str,
    threads: int = 1,
) -> Result:
    d = w.matrices[0].shape[-2]
    return run(
        "prefill_experts_down",
        {
            "D": d,
            "EXPERTS": len(offsets) - 1,
            "TOP": 1,
            "F": h.shape[1],
            "SHARED": shared.shape[1],
            "TILE_ROWS": 64,
        },
        {"rows": len(shared)},
        precision,
        isa=isa,
        threads=threads,
        h=h,
        shared=shared,
        offsets=offsets,
        weight=w,
        shared_weight=ws,
        out=(len(h), d),
        shared_out=(len(shared), d),
    )


def of_every_token(y: Any, gate: Any, up: Any) -> Any:
    """What each expert makes of each token."""
    tokens = np.tile(np.arange(len(y)), len(gate))
    return oracle.experts_up(y, np.arange(len(gate) + 1) * len(y), tokens, gate, up)


def stacked(matrices: list[Any], experts: int) -> list[Any]:
    return [m.reshape(experts, -1, m.shape[-1]) for m in matrices]


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    counts=COUNTS,
    d=COLS,
    f=ROWS,
    bits=st.lists(BITS, min_size=2, max_size=2),
    seed=SEEDS,
    threads=THREADS,
)
def test_up_of_any_shape(
    build: tuple[str, str],
    counts: list[int],
    d: int,
    f: int,
    bits: list[int],
    seed: int,
    threads: int,
) -> None:
    if sum(counts) == 0:
        counts[0] = 1
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(f, d), (f, d)], bits, len(counts))
    offsets, src = oracle.grouping(rng, counts, tokens=9)
    y = rounded(normals(rng, 9, d), build[0])
    got = experts_up(y, offsets, src, w, *build, threads)
    gate, up = stacked(w.matrices, len(counts))
    expected = oracle.experts_up(y, offsets, src, gate, up)
    got.expect("h", expected, act=True, like=of_every_token(y, gate, up))
    used = sum(n > 0 for n in counts)
    assert got.weight_bytes == used * expert_bytes(w, len(counts)), "empty experts are not read"


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    counts=COUNTS,
    f=COLS,
    shared=COLS,
    d=ROWS,
    bits=st.tuples(BITS, BITS),
    seed=SEEDS,
    threads=THREADS,
)
def test_down_of_any_shape(
    build: tuple[str, str],
    counts: list[int],
    f: int,
    shared: int,
    d: int,
    bits: tuple[int, int],
    seed: int,
    threads: int,
) -> None:
    if sum(counts) == 0:
        counts[0] = 1
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(d, f)], bits[0], len(counts))
    ws = random_weight(rng, [(d, shared)], bits[1])
    offsets, src = oracle.grouping(rng, counts, tokens=9)
    h = rounded(normals(rng, len(src), f), build[0])
    s = rounded(normals(rng, 9, shared), build[0])
    got = experts_down(h, s, offsets, w, ws, *build, threads)
    got.expect(
        "out", oracle.experts_down(h, offsets, stacked(w.matrices, len(counts))[0]), act=True
    )
    got.expect("shared_out", oracle.project(s, ws.matrix), act=True)


@builds
def test_a_rows_bits_depend_on_its_token_and_expert_alone(precision: str, isa: str) -> None:
    rng = np.random.default_rng(1)
    experts, d, f, tokens = 5, 320, 40, 70
    up = random_weight(rng, [(f, d), (f, d)], [4, 8], experts)
    down = random_weight(rng, [(24, 64)], 4, experts)
    shared_down = random_weight(rng, [(24, 64)])
    y, h = normals(rng, tokens, d), normals(rng, tokens, 64)

    def of(expert: int, rows: Any, threads: int) -> tuple[Any, Any]:
        """The rows of an expert, among others that have one row each."""
        counts = [len(rows) if e == expert else 1 for e in range(experts)]
        src = np.concatenate([rows if e == expert else [e] for e in range(experts)])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        own = slice(offsets[expert], offsets[expert + 1])
        high = experts_up(y, offsets, src, up, precision, isa, threads)["h"]
        low = experts_down(h[src], h[:3], offsets, down, shared_down, precision, isa, threads)[
            "out"
        ]
        return high[own], low[own]

    for expert in (0, 3):
        whole = of(expert, np.arange(tokens), 1)
        backwards = of(expert, np.arange(tokens)[::-1], 2)
        for all_rows, turned in zip(whole, backwards, strict=True):
            assert np.array_equal(all_rows, turned[::-1])
        for n in (1, 5, 6, 7, 8, 9, 16, 17, 32, 33, 48):
            rows = rng.permutation(tokens)[:n]
            for all_rows, some in zip(whole, of(expert, rows, n % 3 + 1), strict=True):
                assert np.array_equal(some, all_rows[rows]), n


@pytest.mark.parametrize("isa", isas())
def test_more_than_32767_grouped_rows(isa: str) -> None:
    # One expert takes more rows than a 16-bit number holds, some take none, one takes the rest.
    rng = np.random.default_rng(2)
    counts, d, f = [0, 34_000, 0, 1, 7_000], 64, 16
    up = random_weight(rng, [(f, d), (f, d)], 4, len(counts))
    down = random_weight(rng, [(f, d)], 4, len(counts))
    shared_down = random_weight(rng, [(f, d)])
    offsets, src = oracle.grouping(rng, counts, tokens=600)
    y = rounded(normals(rng, 600, d), "fast")
    got = experts_up(y, offsets, src, up, "fast", isa, 2)
    got.expect("h", oracle.experts_up(y, offsets, src, *up.matrices), act=True)
    got = experts_down(y[src], y, offsets, down, shared_down, "fast", isa, 2)
    got.expect("out", oracle.experts_down(y[src], offsets, down.matrices[0]), act=True)
    got.expect("shared_out", oracle.project(y, shared_down.matrix), act=True)
