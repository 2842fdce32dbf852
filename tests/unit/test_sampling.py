"""Sampling options: limits, edge values, precedence."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.errors import CheckpointError
from lily.sampling import OPTIONS, Sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 1.01},
        {"top_p": -0.01},
        {"top_p": math.nan},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": "x"},
        {"repetition_penalty": -1},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {-1: 0}},
        {"logit_bias": {"1": 0}},
        {"logit_bias": [1]},
    ],
    ids=str,
)
def test_bad_value_names_its_option(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}"):
        Sampling(**options)
    with pytest.raises(ValueError, match=f"^{name}"):
        Sampling().merged(options)


def test_edge_values_are_accepted() -> None:
    Sampling(temperature=0, top_k=10**9, top_p=0, min_p=1, seed=2**64 - 1)
    Sampling(temperature=2, top_k=0, top_p=1, min_p=0, seed=0)
    Sampling().merged({"temperature": np.float32(0.5), "top_k": np.int64(3)})
    assert Sampling(temperature=1) == Sampling(temperature=1.0)


@pytest.mark.parametrize(
    "options", [{"temperature": 0, "top_p": 0.3, "min_p": 0.1}, {"top_p": 0}, {"top_k": 1}], ids=str
)
def test_greedy_forms(options: dict[str, Any]) -> None:
    assert Sampling(**options).is_greedy


def test_greedy() -> None:
    assert Sampling.greedy().is_greedy
    assert not Sampling.greedy().has_penalties
    assert not Sampling().is_greedy


@pytest.mark.parametrize("neutral", [0, 1])
def test_neutral_penalties(neutral: float) -> None:
    sampling = Sampling(repetition_penalty=neutral)
    assert sampling == Sampling()
    assert not sampling.has_penalties


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_noticed(name: str) -> None:
    assert Sampling().merged({name: 1.5}).has_penalties


def test_strong_negative_bias_bans() -> None:
    sampling = Sampling(logit_bias={3: -100, 5: -math.inf, 7: -99, 9: 100})
    assert sampling.banned_ids == {3, 5}


def test_bias_is_a_private_copy() -> None:
    bias = {3: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[4] = 2.0
    assert sampling.logit_bias == {3: 1.0}
    assert Sampling().logit_bias is not Sampling().logit_bias


def test_precedence() -> None:
    checkpoint = Sampling.from_generation_config(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    )
    session, call = {"temperature": 0.8, "top_k": 5}, {"temperature": 0.9, "top_p": None}
    assert checkpoint.merged(session).merged(call) == Sampling(temperature=0.9, top_k=5, top_p=0.95)


def test_generation_config() -> None:
    assert Sampling.from_generation_config({}) == Sampling()
    assert Sampling.from_generation_config({"temperature": None}) == Sampling()
    assert Sampling.from_generation_config({"do_sample": False, "temperature": 0.6}).is_greedy
    with pytest.raises(CheckpointError, match="generation_config.json: top_p"):
        Sampling.from_generation_config({"top_p": 3})


def test_unknown_option_is_named_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="temprature: .* did you mean temperature"):
        Sampling().merged({"temprature": 1})
    with pytest.raises(ValueError, match="mirostat: .* expected one of temperature"):
        Sampling().merged({"mirostat": 2})
    with pytest.raises(TypeError, match="temprature"):
        Sampling(temprature=1)  # type: ignore[call-arg]


def test_is_a_plain_value() -> None:
    sampling = Sampling(seed=3, logit_bias={1: 2.0})
    for twin in (pickle.loads(pickle.dumps(sampling)), copy.deepcopy(sampling)):
        assert twin == sampling
    assert Sampling(**dataclasses.asdict(sampling)) == sampling
    assert hash(sampling) == hash(dataclasses.replace(sampling))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.seed = 4  # type: ignore[misc]


@given(st.dictionaries(st.sampled_from(OPTIONS), st.floats() | st.integers() | st.none()))
def test_any_numbers_either_work_or_are_named(options: dict[str, Any]) -> None:
    try:
        merged = Sampling().merged(options)
    except ValueError as error:
        assert any(str(error).startswith(name) for name in options)
    else:
        assert merged.merged({}) == merged
