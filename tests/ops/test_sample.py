"""Picking the next token: edge values by hand, the distribution by chi-square."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from harness import isas, random_weight, run
from hypothesis import given, settings
from hypothesis import strategies as st

NO_TOKEN = 0xFFFFFFFF
D = 64
OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}

EMBEDDINGS = {v: random_weight(np.random.default_rng(0), [(v, D)]) for v in (5, 40, 500)}


def sample(logits: Any, *, isa: str = "", valid: int | None = None, **options: Any) -> Any:
    """Token and counts. `bias` maps ids to numbers; `counts` turns penalties on."""
    v = len(logits)
    bias = options.pop("bias", {})
    counts = options.pop("counts", None)
    slot = options.pop("slot", 0)
    penalties = int(counts is not None)
    got = run(
        "sample",
        {"D": D, "V": v, "VALID": v if valid is None else valid, "PENALTIES": penalties},
        OFF | {"n_bias": len(bias), "slot": slot} | options,
        isa=isa,
        logits=np.asarray(logits, np.float32),
        embedding=EMBEDDINGS[v],
        bias_ids=np.array([*bias, 0], np.uint32),
        bias=np.array([*bias.values(), 0], np.float32),
        counts=counts,
        adjusted=(v,),
        tokens=np.array([77, 77], np.uint32),
        x=(D,),
    )
    token = int(got["tokens"][slot])
    assert got["tokens"][1 - slot] == 77
    row = EMBEDDINGS[v].matrix[token] if token != NO_TOKEN else np.zeros(D)
    assert np.array_equal(got["x"], row)
    return (token, got["counts"]) if counts is not None else token


def test_philox_known_answers() -> None:
    # kat_vectors of the Random123 distribution.
    assert oracle.philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    expected = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert oracle.philox([ones] * 4, [ones] * 2) == expected
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    expected = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert oracle.philox(pi, [0xA4093822, 0x299F31D0]) == expected


@pytest.mark.parametrize("isa", isas())
def test_the_draw_follows_philox(isa: str) -> None:
    # Equal weights: the token's rank is the uniform number times their number.
    for seed, step in [(0, 0), (1, 2), (2**64 - 1, 2**40 + 5), (12345678901234567, 3)]:
        expected = int(oracle.uniform(seed, step) * 500)
        assert sample(np.zeros(500), isa=isa, seed=seed, step=step) == expected


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("maxima", [1, 3])
def test_greedy_takes_the_lowest_of_the_largest(slot: int, maxima: int) -> None:
    values = np.array([2.0, 5.0, 5.0], np.float32)[-maxima:]
    ids = np.array([1, 39, 7], np.uint32)[-maxima:]
    got = run(
        "sample_greedy",
        {"D": D, "MAXIMA": maxima},
        {"slot": slot},
        maxima=np.stack([values.view(np.uint32), ids], 1),
        embedding=EMBEDDINGS[40],
        tokens=np.array([77, 77], np.uint32),
        x=(D,),
    )
    assert got["tokens"][slot] == 7
    assert got["tokens"][1 - slot] == 77
    assert np.array_equal(got["x"], EMBEDDINGS[40].matrix[7])


LOGITS = np.array([1.0, 3.0, 3.0, -2.0, 0.5], np.float32)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0, "temperature": 1e-6}],
)
def test_options_that_leave_the_best(options: dict[str, float]) -> None:
    for step in range(20):
        assert sample(LOGITS, step=step, **options) in {1} | ({2} if "min_p" in options else set())


def test_bias_comes_first_and_bans() -> None:
    assert sample(LOGITS, temperature=0.0, bias={3: 10.0}) == 3
    assert sample(LOGITS, temperature=0.0, bias={1: -np.inf}) == 2
    assert sample(LOGITS, temperature=0.0, bias={1: -np.inf, 2: -np.inf}) == 0


@pytest.mark.parametrize("isa", isas())
@given(allowed=st.sets(st.integers(0, 39)), temperature=st.sampled_from([0.0, 1.0, 9.0]))
def test_a_mask_with_an_entry_for_each_token(
    isa: str, allowed: set[int], temperature: float
) -> None:
    logits = np.random.default_rng(1).standard_normal(40)
    mask = {i: 0.0 if i in allowed else -np.inf for i in range(40)}
    token = sample(logits, isa=isa, temperature=temperature, bias=mask, seed=3)
    assert token in allowed if allowed else token == NO_TOKEN
    if allowed and temperature == 0:
        assert token == max(allowed, key=lambda i: logits[i])


def test_padding_rows_are_never_drawn() -> None:
    logits = np.zeros(40)
    logits[30:] = 100
    drawn = {sample(logits, valid=30, step=step) for step in range(100)}
    assert max(drawn) < 30
    assert sample(logits, valid=30, temperature=0.0) == 0


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_without_a_possible_token_none_is_drawn(value: float) -> None:
    for temperature in (0.0, 1.0):
        assert sample(np.full(5, value), temperature=temperature) == NO_TOKEN


def test_what_is_not_a_number_is_masked() -> None:
    logits = np.array([np.nan, 1.0, np.nan, 2.0, -np.inf])
    assert sample(logits, temperature=0.0) == 3
    assert {sample(logits, step=step) for step in range(50)} == {1, 3}


def test_an_infinite_logit_wins() -> None:
    assert sample([0.0, np.inf, 0.0, np.inf, 0.0]) == 1


def test_penalties() -> None:
    prompt = 0x80000000
    # Seen in the prompt: repetition only. A positive logit is divided, a negative one multiplied.
    counts = np.array([0, prompt, 0, 0, 0], np.uint32)
    assert sample(LOGITS, temperature=0.0, counts=counts, presence=9.0, repetition=2.0)[0] == 2
    assert sample(LOGITS, temperature=0.0, counts=counts, presence=9.0)[0] == 1
    negative = np.array([-1.0, -1.5, -9, -9, -9], np.float32)
    seen = np.array([prompt, 0, 0, 0, 0], np.uint32)
    assert sample(negative, temperature=0.0, counts=seen, repetition=2.0)[0] == 1
    # Generated: presence once, frequency each time.
    counts = np.array([0, 2, 3, 0, 0], np.uint32)
    assert sample(LOGITS, temperature=0.0, counts=counts, frequency=0.1)[0] == 1
    assert sample(LOGITS, temperature=0.0, counts=counts, presence=3.0)[0] == 0


def test_the_drawn_token_is_counted() -> None:
    counts = np.array([0, 0x80000005, 0, 0, 0], np.uint32)
    token, after = sample(LOGITS, temperature=0.0, counts=counts)
    assert token == 1
    assert after.tolist() == [0, 0x80000006, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 7},
        {"top_p": 0.6},
        {"top_k": 9, "top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 1000},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    logits = np.random.default_rng(4).standard_normal(40) * 1.5
    expected = oracle.distribution(logits.astype(np.float32), **options)
    draws = 3000
    drawn = np.bincount(
        [sample(logits, seed=11, step=step, **options) for step in range(draws)], minlength=40
    )
    assert not drawn[expected == 0].any()
    kept = expected > 0
    chi = float(np.sum((drawn[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])))
    freedom = int(kept.sum()) - 1
    # Seeds are fixed, so this never flickers; chi-square of n degrees stays below n + 4√(2n) + 9.
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 9


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(isas()),
    scale=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 100.0]),
    top_k=st.sampled_from([0, 2, 20, 499, 500, 10**6]),
    top_p=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    quantised=st.booleans(),
)
def test_a_token_outside_the_kept_set_is_never_drawn(
    isa: str, scale: float, quantised: bool, seed: int, step: int, **options: float
) -> None:
    logits = np.random.default_rng(seed % 1000).standard_normal(500).astype(np.float32) * scale
    if quantised:
        logits = np.round(logits)  # many ties
    token = sample(logits, isa=isa, seed=seed, step=step, **options)
    kept = oracle.distribution(logits, **options) > 0
    # float32 rounding may move the edge of the set past a token of nearly the same probability.
    p = oracle.distribution(logits, temperature=options["temperature"])
    assert p[token] >= 0.9999 * p[kept].min()
