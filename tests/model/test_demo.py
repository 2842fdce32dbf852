"""The demo checkpoint, end to end: trained weights, its own tokenizer, English.

`golden/demo.json` holds what transformers computes from the same weights in float32, and prose that
the model wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "demo_model" / "checkpoint"
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "demo.json").read_text("utf-8"))
LIMIT = 20_000_000  # bytes of the checkpoint's folder
GREEDY = lily.Sampling.greedy()


@pytest.fixture(scope="module")
def demo() -> Iterator[lily.Model]:
    with lily.Model.load(CHECKPOINT) as model:
        yield model


@pytest.fixture(scope="module")
def exact() -> Iterator[lily.Model]:
    with lily.Model.load(CHECKPOINT, precision="float32") as model:
        yield model


def test_the_golden_file_is_of_this_checkpoint() -> None:
    weights = (CHECKPOINT / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest().startswith(GOLDEN["sha256"])
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < LIMIT


@pytest.mark.parametrize("case", GOLDEN["greedy"], ids=range(len(GOLDEN["greedy"])))
def test_greedy_continuations_are_those_of_transformers(
    exact: lily.Model, case: dict[str, Any]
) -> None:
    assert case["least_lead"] > 1e-3, "the golden tokens must not hang on a rounding"
    session = exact.session()
    session.prefill(case["prompt"])
    pieces = session.stream(len(case["tokens"]), GREEDY, stop_ids=())
    assert [p.token for p in pieces if p.token is not None] == case["tokens"]


def test_perplexity_of_prose_is_that_of_transformers(demo: lily.Model, exact: lily.Model) -> None:
    want = math.exp(GOLDEN["prose_nats_per_token"])
    for model, tolerance in ((exact, 1e-5), (demo, 2e-3)):
        found = lily.perplexity(model, GOLDEN["prose"], window=GOLDEN["prose_tokens"])
        assert found.positions == GOLDEN["prose_tokens"] - 1
        assert found.perplexity == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_turns_think_if_asked_and_end_by_themselves(demo: lily.Model, thinking: bool) -> None:
    messages = [{"role": "user", "content": "Who was standing at the door?"}]
    ended = 0
    for seed in range(4):
        result = demo.generate(messages, thinking=thinking, max_tokens=600, seed=seed).result()
        ended += result.finish_reason == "stop"
        thought, closed, answer = result.text.rpartition("</think>")
        assert bool(closed) is thinking, result.text
        assert bool(thought.strip()) is thinking
        assert len(answer.split()) > 3, result.text
        assert "<|im_end|>" not in result.text
    assert ended >= 3, "sampled answers hardly ever run on"


def test_a_second_turn_reuses_the_first_and_says_the_same(exact: lily.Model) -> None:
    ask = {"role": "user", "content": "The Count opened the letter."}
    again = {"role": "user", "content": "What did it say?"}
    session = exact.session()

    def answer(messages: list[dict[str, str]], **options: Any) -> lily.Result:
        return session.generate(
            messages, thinking=False, temperature=0, max_tokens=60, **options
        ).result()

    first = answer([ask])
    talk = [ask, {"role": "assistant", "content": first.text}, again]
    warm, cold = answer(talk), answer(talk, reuse="off")
    assert warm.usage.reused > 0
    assert cold.usage.reused == 0
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("seed", [1, 2, 3] if os.environ.get("LILY_LONG") else [1])
def test_long_generation_does_not_end_in_a_loop(demo: lily.Model, seed: int) -> None:
    """1,400 tokens at temperature 0.8: past ten attention blocks, and still new words."""
    session = demo.session()
    session.prefill(demo.encode("It was late in the evening when"))
    sampling = lily.Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=seed)
    tokens = [p.token for p in session.stream(1400, sampling, stop_ids=()) if p.token is not None]
    assert len(tokens) == 1400
    for part in (tokens[:350], tokens[-350:]):
        fours = {tuple(part[i : i + 4]) for i in range(len(part) - 3)}
        assert len(fours) > 0.9 * (len(part) - 3), demo.decode(part)


def test_it_writes_words_of_its_books(demo: lily.Model) -> None:
    """What it samples scores like prose to itself, and noise does not."""
    result = demo.generate("The old man said", max_tokens=300, seed=4).result()
    written = lily.perplexity(demo, result.text).perplexity
    noise = np.random.default_rng(0).integers(0, demo.tokenizer.n_tokens, 300).tolist()
    assert written < 60 < 1000 < lily.perplexity(demo, noise).perplexity
