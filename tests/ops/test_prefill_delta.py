"""Prefill's delta rule against its formula, in both builds and on every instruction set; and that a
prompt may be cut anywhere without a changed bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_rows
import pytest
from harness import PRECISIONS, Result, isas, normals, relative_rms, rounded, run
from hypothesis import given, settings
from hypothesis import strategies as st

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]

Shape = tuple[int, int, int, int]
"""Key heads, heads, Dk, Dv."""

KEY_HEADS = st.integers(1, 3)
RATIO = st.sampled_from([1, 2, 3, 4, 8, 16])
WIDTH = st.sampled_from([32, 64, 96, 128, 160, 256])
TOKENS = st.one_of(st.integers(1, 6), st.integers(1, 130))
POSITIONS = st.integers(0, 9)
SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])

SCAN_TOLERANCE = 2e-6
"""Relative RMS. Inputs are exact and the arithmetic is float32 in both builds; errors of the state
pass from token to token."""


def channels(shape: Shape) -> int:
    key_heads, heads, dk, dv = shape
    return 2 * key_heads * dk + heads * dv


def constants(shape: Shape) -> dict[str, float]:
    return dict(zip(("KEY_HEADS", "HEADS", "DK", "DV"), shape, strict=True))


# Inputs.


def prep_inputs(rng: np.random.Generator, t: int, shape: Shape, precision: str) -> dict[str, Any]:
    heads = shape[1]
    return {
        "qkv": rounded(normals(rng, t, channels(shape)), precision),
        "ring": rounded(normals(rng, 4, channels(shape)), precision),
        "conv": normals(rng, channels(shape), 4) * 0.5,
        "gates": normals(rng, t, 2, heads) * 4,
        "decay": np.stack([-rng.uniform(0.01, 8, heads), rng.uniform(-5, 3, heads)]),
    }


def prep(
    inputs: dict[str, Any], position: int, shape: Shape, precision: str, isa: str, threads: int = 1
) -> Result:
    key_heads, heads, dk, dv = shape
    t = len(inputs["qkv"])
    return run(
        "prefill_delta_prep",
        constants(shape),
        {"rows": t, "position": position},
        precision,
        isa=isa,
        threads=threads,
        **inputs,
        q=(t, key_heads, dk),
        k=(t, key_heads, dk),
        v=(t, heads, dv),
        steps=(t, 2, heads),
    )


def ring_after(qkv: Any, ring: Any, position: int, precision: str, isa: str) -> Any:
    at = {"rows": len(qkv), "position": position}
    size = {"CHANNELS": qkv.shape[1]}
    return run("prefill_ring", size, at, precision, isa=isa, qkv=qkv, ring=ring)["ring"]


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    t=TOKENS,
    position=POSITIONS,
    key_heads=KEY_HEADS,
    ratio=RATIO,
    dk=WIDTH,
    dv=WIDTH,
    cut=st.integers(0, 130),
    seed=SEEDS,
    threads=THREADS,
)
def test_inputs(
    build: tuple[str, str],
    t: int,
    position: int,
    key_heads: int,
    ratio: int,
    dk: int,
    dv: int,
    cut: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    shape = (key_heads, key_heads * ratio, dk, dv)
    inputs = prep_inputs(np.random.default_rng(seed), t, shape, precision)
    got = prep(inputs, position, shape, precision, isa, threads)
    expected = oracle_rows.delta_inputs(**inputs, position=position, shape=shape)
    for name in "qkv":
        got.expect(name, expected[name], act=True)
    assert relative_rms(got["steps"], expected["steps"]) < 1e-6

    cut %= t
    if cut == 0:
        return
    left = {**inputs, "qkv": inputs["qkv"][:cut], "gates": inputs["gates"][:cut]}
    right = {**inputs, "qkv": inputs["qkv"][cut:], "gates": inputs["gates"][cut:]}
    right["ring"] = ring_after(left["qkv"], inputs["ring"], position, precision, isa)
    parts = [
        prep(left, position, shape, precision, isa),
        prep(right, position + cut, shape, precision, isa),
    ]
    for name in ("q", "k", "v", "steps"):
        assert np.array_equal(np.concatenate([p[name] for p in parts]), got[name]), name


@pytest.mark.parametrize("isa", isas())
def test_inputs_by_hand(isa: str) -> None:
    # One head of 32, two tokens at position 1. Taps add the newest input and half of the one
    # before, which for the first token is ring slot 0. So the values of token 0 are
    # silu(1 + 8/2) and of token 1 silu(2 + 1/2). q and k point along channel 0 only.
    qkv, ring = np.zeros((2, 96), np.float32), np.zeros((4, 96), np.float32)
    qkv[:, 0] = qkv[:, 32] = 50
    qkv[0, 64:], qkv[1, 64:], ring[0, 64:] = 1, 2, 8
    conv = np.tile(np.array([0, 0, 0.5, 1], np.float32), (96, 1))
    gates = np.zeros((2, 2, 1), np.float32)
    inputs = {"qkv": qkv, "ring": ring, "conv": conv, "gates": gates}
    inputs["decay"] = np.array([[-2.0], [0.0]], np.float32)
    got = prep(inputs, 1, (1, 1, 32, 32), "float32", isa)
    assert np.allclose(got["v"][0], 5 / (1 + np.exp(-5)))
    assert np.allclose(got["v"][1], 2.5 / (1 + np.exp(-2.5)))
    first = np.eye(32)[0]
    assert np.allclose(got["k"], first, atol=1e-6)
    assert np.allclose(got["q"], first / np.sqrt(32), atol=1e-6)
    assert np.allclose(got["steps"], [[[0.25], [0.5]]] * 2)


@pytest.mark.parametrize("isa", isas())
def test_step_sizes_of_any_gate_stay_in_their_range(isa: str) -> None:
    values = np.array([-3e38, -1e3, -90, -20, 0, 20, 90, 1e3, 3e38], np.float32)
    shape = (1, len(values), 32, 32)
    inputs = prep_inputs(np.random.default_rng(0), 1, shape, "float32")
    inputs["gates"] = np.stack([values, values])[None]
    inputs["decay"] = np.stack([np.full(len(values), -0.5), np.zeros(len(values))])
    got = prep(inputs, 0, shape, "float32", isa)
    expected = oracle_rows.delta_inputs(**inputs, position=0, shape=shape)["steps"]
    assert np.allclose(got["steps"], expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 130])
@pytest.mark.parametrize("position", range(5))
def test_ring(precision: str, t: int, position: int) -> None:
    rng = np.random.default_rng(t)
    qkv = rounded(normals(rng, t, 96), precision)
    ring = rounded(normals(rng, 4, 96), precision)
    expected = ring.copy()
    for i, row in enumerate(qkv):
        expected[(position + i) & 3] = row
    for isa in isas():
        assert np.array_equal(ring_after(qkv, ring, position, precision, isa), expected)


# The recurrence.


def scan_inputs(rng: np.random.Generator, t: int, shape: Shape, precision: str) -> dict[str, Any]:
    key_heads, heads, dk, dv = shape

    def unit(scale: float) -> Any:
        a = normals(rng, t, key_heads, dk)
        return rounded(a / np.linalg.norm(a, axis=-1, keepdims=True) * scale, precision)

    return {
        "q": unit(dk**-0.5),
        "k": unit(1.0),
        "v": rounded(normals(rng, t, heads, dv), precision),
        "steps": rng.uniform(0.02, 0.999, (t, 2, heads)).astype(np.float32),
        "state_in": normals(rng, heads, dv, dk),
    }


def scan(inputs: dict[str, Any], precision: str, isa: str, threads: int = 1) -> Result:
    t, key_heads, dk = inputs["k"].shape
    heads, dv = inputs["v"].shape[1:]
    return run(
        "prefill_delta_scan",
        constants((key_heads, heads, dk, dv)),
        {"rows": t},
        precision,
        isa=isa,
        threads=threads,
        **inputs,
        state_out=inputs["state_in"].shape,
        o=inputs["v"].shape,
    )


def part_of(inputs: dict[str, Any], rows: slice, state: Any) -> dict[str, Any]:
    return {**{n: inputs[n][rows] for n in ("q", "k", "v", "steps")}, "state_in": state}


def check_scan(inputs: dict[str, Any], got: Result) -> None:
    named = {n: inputs[n] for n in ("q", "k", "v", "steps")}
    state, o = oracle_rows.delta_scan(**named, state=inputs["state_in"])
    assert relative_rms(got["state_out"], state) < SCAN_TOLERANCE
    assert relative_rms(got["o"], o) < SCAN_TOLERANCE


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    t=TOKENS,
    key_heads=KEY_HEADS,
    ratio=RATIO,
    dk=WIDTH,
    dv=WIDTH,
    cut=st.integers(0, 130),
    seed=SEEDS,
    threads=THREADS,
)
def test_scan(
    build: tuple[str, str],
    t: int,
    key_heads: int,
    ratio: int,
    dk: int,
    dv: int,
    cut: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    shape = (key_heads, key_heads * ratio, dk, dv)
    inputs = scan_inputs(np.random.default_rng(seed), t, shape, precision)
    got = scan(inputs, precision, isa, threads)
    check_scan(inputs, got)

    cut %= t
    if cut == 0:
        return
    left = scan(part_of(inputs, slice(cut), inputs["state_in"]), precision, isa)
    right = scan(part_of(inputs, slice(cut, None), left["state_out"]), precision, isa)
    assert np.array_equal(np.concatenate([left["o"], right["o"]]), got["o"])
    assert np.array_equal(right["state_out"], got["state_out"])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scan_token_by_token(precision: str, isa: str) -> None:
    inputs = scan_inputs(np.random.default_rng(3), 40, (1, 2, 64, 32), precision)
    whole = scan(inputs, precision, isa)
    state = inputs["state_in"]
    for t in range(40):
        one = scan(part_of(inputs, slice(t, t + 1), state), precision, isa)
        assert np.array_equal(one["o"][0], whole["o"][t])
        state = one["state_out"]
    assert np.array_equal(state, whole["state_out"])


@pytest.mark.parametrize("isa", isas())
def test_steps_at_their_limits(isa: str) -> None:
    inputs = scan_inputs(np.random.default_rng(4), 20, (1, 4, 32, 64), "float32")
    inputs["steps"][:, 0], inputs["steps"][:, 1] = [0, 1, 1, 0], [1, 0, 1, 0]
    got = scan(inputs, "float32", isa)
    check_scan(inputs, got)
    assert np.array_equal(got["state_out"][1], inputs["state_in"][1]), "nothing decays or enters"
    assert not got["state_out"][3].any()


@pytest.mark.parametrize("isa", isas())
def test_what_a_head_holds_stays_in_it(isa: str) -> None:
    inputs = scan_inputs(np.random.default_rng(5), 20, (2, 4, 32, 32), "float32")
    clean = scan(inputs, "float32", isa)
    inputs["v"][7:, 1, 5] = np.nan
    got = scan(inputs, "float32", isa)
    touched = np.isnan(got["o"])
    assert touched[7:, 1, 5].all()
    assert touched.sum() == 13
    assert np.array_equal(got["o"][~touched], clean["o"][~touched])
