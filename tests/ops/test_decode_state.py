"""Decode's delta rule, attention and embedding, against their formulas in float64, in both builds
and on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from harness import (
    PRECISIONS,
    check_new_rows,
    from_int8,
    isas,
    normals,
    random_weight,
    relative_rms,
    rounded,
    run,
    to_int8,
)
from hypothesis import given, settings
from hypothesis import strategies as st

EPS = 1e-6

BUILDS = [(precision, isa) for precision in PRECISIONS for isa in isas()]

SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.sampled_from([1, 2, 3])


# Gated delta net.


@settings(max_examples=30, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    key_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dk=st.sampled_from([32, 64, 96, 128, 256]),
    dv=st.sampled_from([32, 64, 128, 160]),
    partials=st.sampled_from([1, 1, 1, 2]),
    position=st.integers(0, 9),
    seed=SEEDS,
    threads=THREADS,
)
def test_delta_step(
    build: tuple[str, str],
    key_heads: int,
    group: int,
    dk: int,
    dv: int,
    partials: int,
    position: int,
    seed: int,
    threads: int,
) -> None:
    precision, isa = build
    if dv // partials % 32:
        partials = 1
    heads = key_heads * group
    channels = 2 * key_heads * dk + heads * dv
    rng = np.random.default_rng(seed)
    ring = rounded(normals(rng, 4, channels), precision)
    conv, gamma = normals(rng, channels, 4) * 0.5, normals(rng, dv)
    z = rounded(normals(rng, heads, dv), precision)
    gates = normals(rng, 2, heads) * 3
    decay = np.stack([-rng.uniform(0.01, 8, heads), rng.uniform(-5, 3, heads)]).astype(np.float32)
    state = normals(rng, heads, dv, dk)
    got = run(
        "delta_step",
        {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "PARTIALS": partials},
        {"position": position},
        precision,
        isa=isa,
        threads=threads,
        ring=ring,
        conv=conv,
        z=z,
        gates=gates,
        decay=decay,
        gamma=gamma,
        state_in=state,
        state_out=state.shape,
        u=(heads, dv),
        squares=(heads, partials),
    )
    next_state, u, squares = oracle.delta_step(
        ring, conv, z, gates, decay, gamma, state, position, key_heads
    )
    # All inputs are exact and the arithmetic is float32 in both builds.
    assert relative_rms(got["state_out"], next_state) < 1e-6
    assert relative_rms(got["squares"].sum(-1), squares) < 1e-5
    got.expect("u", u, act=True)


@pytest.mark.parametrize("isa", isas())
def test_delta_step_by_hand(isa: str) -> None:
    # One head of 32. The convolution passes the newest input: q ∝ e0, k ∝ e0 + e1 (equal parts),
    # v = silu(2) in row 3. β = 1/2, no decay, S = 0: S[3, :2] = v/2/√2, o[3] = S·q = v/2/√2/√32.
    ring = np.zeros((4, 96), np.float32)
    ring[2, 0], ring[2, 32:34], ring[2, 64 + 3] = 40.0, 40.0, 2.0
    conv = np.zeros((96, 4), np.float32)
    conv[:, 3] = 1
    got = run(
        "delta_step",
        {"KEY_HEADS": 1, "HEADS": 1, "DK": 32, "DV": 32, "PARTIALS": 1},
        {"position": 2},
        isa=isa,
        ring=ring,
        conv=conv,
        z=np.full((1, 32), 40.0, np.float32),
        gates=np.array([[0.0], [-90.0]], np.float32),
        decay=np.array([[-1.0], [0.0]], np.float32),
        gamma=np.full(32, 2.0, np.float32),
        state_in=np.zeros((1, 32, 32), np.float32),
        state_out=(1, 32, 32),
        u=(1, 32),
        squares=(1, 1),
    )
    v = 2 / (1 + np.exp(-2.0))
    state = np.zeros((32, 32))
    state[3, :2] = v / 2 / np.sqrt(2)
    o = v / 2 / np.sqrt(2) / np.sqrt(32)
    assert np.allclose(got["state_out"][0], state, atol=1e-6)
    assert np.allclose(got["u"][0], np.eye(32)[3] * o * 2 * 40, rtol=1e-5)
    assert np.isclose(got["squares"][0, 0], o * o, rtol=1e-5)


# Attention.


def run_attend(
    precision: str,
    isa: str,
    *,
    kv_heads: int,
    group: int,
    dh: int,
    rotary: int,
    position: int,
    block: int | None,
    seed: int,
    threads: int = 1,
    int8: bool = False,
) -> None:
    heads, capacity = kv_heads * group, position + 3
    rng = np.random.default_rng(seed)
    qkv = rounded(normals(rng, 2 * (heads + kv_heads) * dh), precision)
    q_norm, k_norm = normals(rng, dh), normals(rng, dh)
    frequencies = (10.0 ** -np.linspace(0, 5, rotary // 2)).astype(np.float32)
    keys = rounded(normals(rng, kv_heads, capacity, dh), precision)
    values = rounded(normals(rng, kv_heads, capacity, dh), precision)
    cache = (to_int8(keys), to_int8(values)) if int8 else (keys, values)
    blocks = -(-(position + 1) // block) if block else 1
    merge = {
        "partial": (blocks, heads, dh),
        "extent": (blocks, heads, 2),
    }
    got = run(
        "attend",
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DH": dh,
            "ROTARY": rotary,
            "MERGE": int(block is not None),
            "KV_INT8": int(int8),
            "EPS": EPS,
        },
        {"position": position, "capacity": capacity, "block": block or 0, "blocks": blocks},
        precision,
        isa=isa,
        threads=threads,
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        frequencies=frequencies,
        keys=cache[0],
        values=cache[1],
        **(merge if block else {"u": (heads, dh)}),
    )
    q, gate, k, v = oracle.split_qkv(qkv.astype(np.float64), heads, kv_heads, dh)
    (f,) = oracle.f64(frequencies)
    q = oracle.rotate(oracle.norm(q, q_norm, EPS), position, f)
    k = oracle.rotate(oracle.norm(k, k_norm, EPS), position, f)
    new_keys, new_values = keys.astype(np.float64), values.astype(np.float64)
    new_keys[:, position], new_values[:, position] = k, v
    # The kernel reads back what it stored.
    if int8:
        check_new_rows(got["keys"], cache[0], k[:, None], position)
        check_new_rows(got["values"], cache[1], v[:, None], position)
        new_keys, new_values = (from_int8(got[name], keys.shape) for name in ("keys", "values"))
    else:
        got.expect("keys", new_keys, act=True)
        got.expect("values", new_values, act=True)
        others = np.arange(capacity) != position
        assert np.array_equal(got["keys"][:, others], keys[:, others])
        new_keys[:, position] = got["keys"][:, position]
    u = oracle.attend(q, gate, new_keys[:, : position + 1], new_values[:, : position + 1])
    if block:
        got = run(
            "attend_merge",
            {"HEADS": heads, "DH": dh},
            {"blocks": blocks},
            precision,
            isa=isa,
            threads=threads,
            partial=got["partial"],
            extent=got["extent"],
            qkv=qkv,
            u=(heads, dh),
        )
    got.expect("u", u, act=True)


@settings(max_examples=40, deadline=None)
@given(
    build=st.sampled_from(BUILDS),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dh=st.sampled_from([32, 64, 96, 128, 256]),
    quarter=st.booleans(),
    position=st.integers(0, 140),
    block=st.one_of(st.none(), st.sampled_from([1, 16, 50, 128])),
    seed=SEEDS,
    threads=THREADS,
    int8=st.booleans(),
)
def test_attend(build: tuple[str, str], dh: int, quarter: bool, **shape: Any) -> None:
    run_attend(*build, dh=dh, rotary=dh // 4 if quarter else dh, **shape)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attend_over_many_blocks_at_the_real_shape(precision: str) -> None:
    run_attend(
        precision,
        "",
        kv_heads=2,
        group=8,
        dh=256,
        rotary=64,
        position=1500,
        block=128,
        seed=1,
        threads=2,
    )


@pytest.mark.parametrize("isa", isas())
def test_the_first_token_attends_to_itself(isa: str) -> None:
    # One key: softmax is 1, so u = v · sigmoid(gate), whatever q and k.
    rng = np.random.default_rng(0)
    qkv = normals(rng, 4 * 32)
    got = run(
        "attend",
        {"HEADS": 1, "KV_HEADS": 1, "DH": 32, "ROTARY": 8, "MERGE": 0, "EPS": EPS},
        {"position": 0, "capacity": 1, "block": 0, "blocks": 1},
        isa=isa,
        qkv=qkv,
        q_norm=np.ones(32, np.float32),
        k_norm=np.ones(32, np.float32),
        frequencies=np.ones(4, np.float32),
        keys=np.zeros((1, 1, 32), np.float32),
        values=np.zeros((1, 1, 32), np.float32),
        u=(1, 32),
    )
    assert np.allclose(got["u"][0], qkv[96:] / (1 + np.exp(-qkv[32:64])), rtol=1e-5)


@pytest.mark.parametrize("isa", isas())
def test_large_scores_do_not_overflow(isa: str) -> None:
    # The second key scores e^(±large) above the first: all weight goes to one of them.
    rng = np.random.default_rng(2)
    qkv = normals(rng, 4 * 32)
    keys = np.stack([np.zeros(32), np.zeros(32)])[None].astype(np.float32)
    got = run(
        "attend",
        {"HEADS": 1, "KV_HEADS": 1, "DH": 32, "ROTARY": 8, "MERGE": 0, "EPS": EPS},
        {"position": 1, "capacity": 2, "block": 0, "blocks": 1},
        isa=isa,
        qkv=qkv,
        q_norm=np.full(32, 1e4, np.float32),
        k_norm=np.full(32, 1e4, np.float32),
        frequencies=np.ones(4, np.float32),
        keys=keys,
        values=np.ones((1, 2, 32), np.float32),
        u=(1, 32),
    )
    assert np.isfinite(got["u"]).all()


# Embedding.


@settings(max_examples=20, deadline=None)
@given(
    isa=st.sampled_from(isas()),
    rows=st.integers(1, 20),
    first=st.integers(0, 3),
    d=st.integers(1, 9).map(lambda groups: 64 * groups),
    v=st.integers(1, 70),
    bits=st.sampled_from([4, 8, 16]),
    seed=SEEDS,
    threads=THREADS,
)
def test_embed(
    isa: str, rows: int, first: int, d: int, v: int, bits: int, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    w = random_weight(rng, [(v, d)], bits)
    tokens = rng.integers(0, v, first + rows, dtype=np.uint32)
    got = run(
        "embed",
        {"D": d},
        {"rows": rows, "first": first},
        "fast",
        isa=isa,
        threads=threads,
        tokens=tokens,
        weight=w,
        x=(rows, d),
    )
    assert np.array_equal(got["x"], w.matrix[tokens[first:]])
