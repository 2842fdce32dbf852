"""Prefill's attention against its formula, in both builds and on every instruction set; and that a
row's bits do not depend on what surrounds it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import oracle
import oracle_rows
import pytest
from harness import (
    PRECISIONS,
    Result,
    assert_close16,
    assert_close32,
    check_new_rows,
    from_int8,
    isas,
    normals,
    relative_rms,
    rounded,
    run,
    to_int8,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lily import _testing

EPS = 1e-6

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]
builds = pytest.mark.parametrize(("precision", "isa"), BUILDS)

Heads = tuple[int, int, int]
"""Heads, key/value heads, Dh."""

HEADS = st.builds(
    lambda kv, ratio, dh: (kv * ratio, kv, dh),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    st.sampled_from([32, 64, 96, 128, 192, 256]),
)
TOKENS = st.one_of(st.integers(1, 6), st.integers(1, 130))
POSITIONS = st.sampled_from([0, 1, 5, 31, 32, 63, 126, 127, 128, 129, 200])
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])

FAST_TOLERANCE = 5e-3
"""Relative RMS. Probabilities and outputs are rounded to bf16, each by 1.7e-3."""


def qkv_width(shape: Heads) -> int:
    heads, kv_heads, dh = shape
    return 2 * (heads + kv_heads) * dh


# Queries and cache entries.


def prep(
    qkv: Any,
    cache: tuple[Any, Any],
    norms: tuple[Any, Any],
    frequencies: Any,
    position: int,
    shape: Heads,
    precision: str,
    isa: str,
    threads: int = 1,
    **constants: int,
) -> Result:
    heads, kv_heads, dh = shape
    names = ("HEADS", "KV_HEADS", "DH", "ROTARY", "EPS")
    capacity = cache[0].size // kv_heads // (dh + 4 if constants.get("KV_INT8") else dh)
    return run(
        "prefill_attend_prep",
        dict(zip(names, (heads, kv_heads, dh, 2 * len(frequencies), EPS), strict=True)) | constants,
        {"rows": len(qkv), "position": position, "capacity": capacity},
        precision,
        isa=isa,
        threads=threads,
        qkv=qkv,
        q_norm=norms[0],
        k_norm=norms[1],
        frequencies=frequencies,
        keys=cache[0],
        values=cache[1],
        q=(len(qkv), heads, dh),
    )


def check_prep(
    rng: np.random.Generator,
    shape: Heads,
    t: int,
    position: int,
    rotary: int,
    precision: str,
    isa: str = "",
    threads: int = 1,
    int8: bool = False,
) -> None:
    heads, kv_heads, dh = shape
    qkv = rounded(normals(rng, t, qkv_width(shape)), precision)
    norms = normals(rng, dh), normals(rng, dh)
    frequencies = (1e7 ** -(np.arange(rotary // 2) * 2 / rotary)).astype(np.float32)
    old = rounded(normals(rng, 2, kv_heads, position + t + 2, dh), precision)
    cache = (to_int8(old[0]), to_int8(old[1])) if int8 else (old[0], old[1])
    got = prep(
        qkv, cache, norms, frequencies, position, shape, precision, isa, threads, KV_INT8=int(int8)
    )

    q, _, k, v = oracle_rows.split_qkv(qkv, heads, kv_heads, dh)
    q = oracle_rows.rotate(oracle.norm(q, norms[0], EPS), position, frequencies)
    k = oracle_rows.rotate(oracle.norm(k, norms[1], EPS), position, frequencies)
    got.expect("q", q * dh**-0.5, act=True)
    if int8:
        check_new_rows(got["keys"], cache[0], k.swapaxes(0, 1), position)
        check_new_rows(got["values"], cache[1], v.swapaxes(0, 1), position)
        return
    close = assert_close32 if precision == "float32" else assert_close16
    new = slice(position, position + t)
    close(got["keys"][:, new].swapaxes(0, 1), k)
    assert np.array_equal(got["values"][:, new].swapaxes(0, 1), v)
    for name, before in (("keys", old[0]), ("values", old[1])):
        others = np.delete(got[name], new, axis=1)
        assert np.array_equal(others, np.delete(before, new, axis=1)), "other entries changed"


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    shape=HEADS,
    t=TOKENS,
    position=st.sampled_from([0, 1, 77, 500]),
    rotary=st.sampled_from([0.25, 0.5, 1.0]),
    seed=SEEDS,
    threads=THREADS,
    int8=st.booleans(),
)
def test_queries_and_cache_entries(
    build: tuple[str, str],
    shape: Heads,
    t: int,
    position: int,
    rotary: float,
    seed: int,
    threads: int,
    int8: bool,
) -> None:
    rng = np.random.default_rng(seed)
    check_prep(rng, shape, t, position, int(shape[2] * rotary), *build, threads, int8)


def test_angles_of_a_distant_position() -> None:
    check_prep(np.random.default_rng(0), (1, 1, 32), 3, 262_000, 32, "float32")


# Attention.


def inputs_of(
    rng: np.random.Generator, shape: Heads, t: int, position: int, precision: str, spare: int = 2
) -> dict[str, Any]:
    """Scores of deviation 2, more than a model's. Entries after the last row's are poison."""
    heads, kv_heads, dh = shape
    capacity = position + t + spare
    cache = rounded(normals(rng, 2, kv_heads, capacity, dh), precision)
    cache[:, :, position + t :] = np.nan
    return {
        "q": rounded(normals(rng, t, heads, dh) * 2 * dh**-0.5, precision),
        "keys": cache[0],
        "values": cache[1],
        "qkv": rounded(normals(rng, t, qkv_width(shape)), precision),
    }


def attend(
    inputs: dict[str, Any],
    position: int,
    shape: Heads,
    precision: str,
    isa: str,
    threads: int = 1,
    int8: bool = False,
) -> Any:
    q, capacity = inputs["q"], inputs["keys"].shape[1]
    if int8:
        inputs = inputs | {name: to_int8(inputs[name]) for name in ("keys", "values")}
    return run(
        "prefill_attend",
        dict(zip(("HEADS", "KV_HEADS", "DH"), shape, strict=True)) | {"KV_INT8": int(int8)},
        {"rows": len(q), "position": position, "capacity": capacity},
        precision,
        isa=isa,
        threads=threads,
        **inputs,
        u=q.shape,
    )["u"]


def expected_of(inputs: dict[str, Any], position: int, shape: Heads) -> Any:
    gates = oracle_rows.split_qkv(inputs["qkv"], *shape)[1]
    return oracle_rows.attend(inputs["q"], inputs["keys"], inputs["values"], gates, position)


def check(u: Any, expected: Any, precision: str) -> None:
    assert_close32(u, expected, 2e-6 if precision == "float32" else FAST_TOLERANCE)


def rows_of(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {**inputs, "q": inputs["q"][rows], "qkv": inputs["qkv"][rows]}


@settings(max_examples=60, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    shape=HEADS,
    t=TOKENS,
    position=POSITIONS,
    cut=st.integers(0, 130),
    seed=SEEDS,
    threads=THREADS,
)
def test_attention(
    build: tuple[str, str],
    shape: Heads,
    t: int,
    position: int,
    cut: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    inputs = inputs_of(np.random.default_rng(seed), shape, t, position, precision)
    u = attend(inputs, position, shape, precision, isa, threads)
    check(u, expected_of(inputs, position, shape), precision)

    cut %= t
    if cut == 0:
        return
    inputs["keys"][:, position + cut :], saved = np.nan, inputs["keys"].copy()
    left = attend(rows_of(inputs, slice(cut)), position, shape, precision, isa)
    inputs["keys"] = saved
    right = attend(rows_of(inputs, slice(cut, None)), position + cut, shape, precision, isa)
    assert np.array_equal(np.concatenate([left, right]), u)


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    shape=HEADS,
    t=TOKENS,
    position=POSITIONS,
    cut=st.integers(0, 130),
    seed=SEEDS,
    threads=THREADS,
)
def test_attention_over_an_int8_cache(
    build: tuple[str, str],
    shape: Heads,
    t: int,
    position: int,
    cut: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    inputs = inputs_of(np.random.default_rng(seed), shape, t, position, precision, spare=0)
    u = attend(inputs, position, shape, precision, isa, threads, int8=True)
    stored = {n: from_int8(to_int8(inputs[n]), inputs[n].shape) for n in ("keys", "values")}
    check(u, expected_of(inputs | stored, position, shape), precision)
    right = rows_of(inputs, slice(cut % t, None))
    again = attend(right, position + cut % t, shape, precision, isa, int8=True)
    assert np.array_equal(again, u[cut % t :])


@builds
def test_rows_one_by_one(precision: str, isa: str) -> None:
    shape, position, t = (6, 2, 64), 100, 70
    inputs = inputs_of(np.random.default_rng(1), shape, t, position, precision)
    u = attend(inputs, position, shape, precision, isa, 2)
    for i in range(t):
        one = attend(rows_of(inputs, slice(i, i + 1)), position + i, shape, precision, isa)
        assert np.array_equal(one[0], u[i]), i


@builds
def test_more_rows_than_a_task_takes(precision: str, isa: str) -> None:
    shape, position, t = (16, 1, 32), 40, 90
    inputs = inputs_of(np.random.default_rng(2), shape, t, position, precision)
    u = attend(inputs, position, shape, precision, isa, 1)
    check(u, expected_of(inputs, position, shape), precision)
    assert np.array_equal(attend(inputs, position, shape, precision, isa, 3), u)


@builds
@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e10])
def test_scores_of_any_size(precision: str, isa: str, size: float) -> None:
    # Key n is n mod 7 in one place: the scores are multiples of `size`, the largest shared by many.
    shape, position, t = (2, 1, 32), 300, 20
    inputs = inputs_of(np.random.default_rng(3), shape, t, position, precision)
    inputs["q"][:] = 0
    inputs["q"][:, 0, 0], inputs["q"][:, 1, 0] = size, -size
    inputs["keys"][0, :, 0] = np.arange(inputs["keys"].shape[1]) % 7
    inputs = {**inputs, "q": rounded(inputs["q"], precision)}
    u = attend(inputs, position, shape, precision, isa)
    check(u, expected_of(inputs, position, shape), precision)


@builds
def test_scores_that_rise_and_fall(precision: str, isa: str) -> None:
    # The largest score so far moves in most tiles of one head and in none of the other.
    shape, position, t = (2, 1, 32), 700, 9
    inputs = inputs_of(np.random.default_rng(4), shape, t, position, precision)
    inputs["q"][:, 0, 0], inputs["q"][:, 1, 0] = 1, -1
    inputs["keys"][0, :, 0] = rounded(np.arange(inputs["keys"].shape[1]) / 8, precision)
    u = attend(inputs, position, shape, precision, isa)
    # Scores near 100 are rounded by 4e-6, and their exponentials relatively as much.
    tolerance = 1e-5 if precision == "float32" else FAST_TOLERANCE
    assert_close32(u, expected_of(inputs, position, shape), tolerance)


@builds
def test_one_key_gives_its_value(precision: str, isa: str) -> None:
    shape = (3, 3, 32)
    inputs = inputs_of(np.random.default_rng(5), shape, 1, 0, precision)
    inputs["qkv"][:] = 40  # gates of 1
    u = attend(inputs, 0, shape, precision, isa)
    assert relative_rms(u[0], inputs["values"][:, 0]) < 1e-6


@builds
def test_a_nan_stays_in_its_row(precision: str, isa: str) -> None:
    shape, position, t = (4, 1, 32), 150, 12
    inputs = inputs_of(np.random.default_rng(6), shape, t, position, precision)
    clean = attend(inputs, position, shape, precision, isa)
    inputs["q"][5, 2, 3] = np.nan
    u = attend(inputs, position, shape, precision, isa)
    assert np.isnan(u[5, 2]).all()
    u[5, 2] = clean[5, 2]
    assert np.array_equal(u, clean)


@pytest.mark.skipif("amx" not in _testing.description(1, ""), reason="this processor has no AMX")
def test_all_this_without_the_matrix_unit() -> None:
    if os.environ.get("LILY_CPU_NO_TILES"):
        pytest.skip("this is that run")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    subprocess.run(
        [*command, "-k", "bf16 or test_attention"],
        env={**os.environ, "LILY_CPU_NO_TILES": "1"},
        check=True,
    )
