"""Scores of texts and choices against logits taken step by step."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

import lily

TEXT = [3, 17, 200, 5, 5, 90, 41, 7]
BEFORE = list(range(60, 100))


def stepped(model: lily.Model, before: list[int], tokens: list[int]) -> list[float]:
    """Log probabilities of `tokens`, one decode call at a time."""
    session = model.session()
    logits = session.prefill(before)
    found = []
    for token in tokens:
        found.append(float(logits.log_softmax()[token]))
        logits = session.decode(token)
    return found


def test_a_score_is_what_stepping_gives(tiny: lily.Model) -> None:
    score = tiny.score(TEXT)
    assert score.tokens == tuple(TEXT)
    assert score.logprobs[0] is None
    assert np.allclose(score.logprobs[1:], stepped(tiny, TEXT[:1], TEXT[1:]), atol=1e-4)
    assert math.isclose(score.total, math.fsum(p for p in score.logprobs if p is not None))
    assert math.isclose(score.perplexity, math.exp(-score.total / 7))
    assert "".join(score.pieces) == tiny.decode(TEXT)


def test_text_before_is_read_and_not_scored(tiny: lily.Model) -> None:
    score = tiny.score(TEXT, after=BEFORE)
    assert np.allclose(score.logprobs, stepped(tiny, BEFORE, TEXT), atol=1e-4)
    whole = tiny.score(BEFORE + TEXT)
    assert np.allclose(score.logprobs, whole.logprobs[len(BEFORE) :], atol=1e-4)
    assert tiny.score("ab", after="c").tokens == tuple(tiny.encode("ab"))


def test_a_long_text_is_scored_in_parts(tiny: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(3).integers(0, 280, 150).tolist()
    want = tiny.score(text)
    module = sys.modules["lily.perplexity"]  # the package has a function of that name
    monkeypatch.setattr(module, "SCORED_VALUES", 40 * tiny.info.config.vocab_size)
    done: list[tuple[int, int]] = []
    parts = tiny.score(text, progress=lambda *n: done.append(n))
    assert np.allclose(parts.logprobs[1:], want.logprobs[1:], atol=1e-4)
    assert done == [(41, 150), (81, 150), (121, 150), (150, 150)]


def test_one_token_alone_has_no_score(tiny: lily.Model) -> None:
    score = tiny.score([4])
    assert (score.logprobs, score.total, score.perplexity) == ((None,), 0.0, 1.0)
    assert tiny.score([4], after=[3]).logprobs == (pytest.approx(stepped(tiny, [3], [4])[0]),)


def test_choices_are_ranked_by_their_log_probability(tiny: lily.Model) -> None:
    choices = [[5, 6], [200], [7, 8, 9, 10], [5, 6, 1], [200]]
    totals = [sum(stepped(tiny, BEFORE, choice)) for choice in choices]
    ranked = tiny.rank(BEFORE, choices)
    assert [r.index for r in ranked] == sorted(range(5), key=lambda i: -totals[i])
    for r in ranked:
        assert r.choice == choices[r.index]
        assert math.isclose(r.total, totals[r.index], abs_tol=1e-3)
        assert math.isclose(r.mean, r.total / len(choices[r.index]))
        assert r.score.tokens == tuple(choices[r.index])
    means = [total / len(choice) for total, choice in zip(totals, choices, strict=True)]
    by_mean = tiny.rank(BEFORE, choices, by="mean")
    assert [r.index for r in by_mean] == sorted(range(5), key=lambda i: -means[i])


def test_choices_may_be_texts(tiny: lily.Model) -> None:
    greedy = tiny.generate("abc", max_tokens=1, temperature=0).result().tokens
    ranked = tiny.rank("abc", ["x", tiny.decode(greedy), "yy"])
    assert ranked[0].index == 1 or ranked[0].score.tokens == greedy


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.score(""), "text: expected at least one token"),
        (lambda m: m.score([5, 1 << 20]), r"text\[1\]: 1048576, expected an id"),
        (lambda m: m.score([5], after=[-1]), r"tokens\[0\]: -1"),
        (lambda m: m.rank("", ["a"]), "prompt: expected at least one token"),
        (lambda m: m.rank("a", []), "choices: found none"),
        (lambda m: m.rank("a", ["a", ""]), r"choices\[1\]: expected at least one token"),
        (lambda m: m.rank("a", ["a"], by="sum"), "by: 'sum', expected"),
    ],
)
def test_wrong_arguments_are_named(tiny: lily.Model, call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(tiny)  # type: ignore[operator]
