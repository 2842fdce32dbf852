"""Keys and values as int8: near the exact ones, the same for every way to the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lily


def prompt(n: int) -> list[int]:
    return [(i * 37 + 11) % 280 for i in range(n)]


@pytest.fixture(scope="module", params=["float32", "fast"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    with lily.Model.load(
        checkpoint("tiny"), precision=request.param, kv="int8", chunk=32
    ) as loaded:
        yield loaded


def logits(session: lily.Session, tokens: list[int]) -> np.ndarray:
    return np.asarray(session.prefill(tokens)).copy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


def test_it_is_said_and_takes_its_memory(
    model: lily.Model, tiny: lily.Model, tiny_fast: lily.Model
) -> None:
    usual = tiny if model.info.precision == "float32" else tiny_fast
    assert model.info.kv == "int8"
    width = 4 if model.info.precision == "float32" else 2
    assert model.info.memory.per_1000_tokens * width * 64 == (
        usual.info.memory.per_1000_tokens * (64 + 4)
    )


def test_logits_are_near(model: lily.Model, tiny: lily.Model, tiny_fast: lily.Model) -> None:
    usual = tiny if model.info.precision == "float32" else tiny_fast
    exact = logits(usual.session(context=200), prompt(150))
    found = logits(model.session(context=200), prompt(150))
    assert 0 < distance(found, exact) < 0.05


def test_prompts_in_pieces_and_forks_give_the_same_bits(model: lily.Model) -> None:
    tokens = prompt(150)
    expected = logits(model.session(context=200), tokens)
    for cut in (1, 31, 129):
        session = model.session(context=200)
        session.prefill(tokens[:cut])
        fork, at = session.fork(), session.snapshot()
        session.prefill(prompt(9))  # beside the others' rows
        assert np.array_equal(logits(fork, tokens[cut:]), expected)
        session.restore(at)
        assert np.array_equal(logits(session, tokens[cut:]), expected)


def test_decoded_tokens_leave_what_a_prompt_does(model: lily.Model) -> None:
    tokens = prompt(140)
    prefilled, decoded = model.session(context=200), model.session(context=200)
    expected = logits(prefilled, tokens)
    decoded.prefill(tokens[:100])
    for token in tokens[100:]:
        found = decoded.decode(token)
    # A number near the middle between two codes may become either.
    tolerance = 2e-3 if model.info.precision == "float32" else 0.05
    assert distance(np.asarray(found), expected) < tolerance


def test_other_element_types_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match='kv: \'bf16\', expected "float32" or "int8"'):
        lily.Model.load(checkpoint("tiny"), precision="float32", kv="bf16")
