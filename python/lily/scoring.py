"""How likely a model finds a text, token by token, and which of several texts goes on best.

The softmax is over the real tokens of the vocabulary, as in `TokenLogprob`: what sampling at
temperature 1 draws from. (`perplexity` includes padding rows, to compare with other engines.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lily.perplexity import chunks, exp
from lily.stream import log_sum
from lily.token_ids import token_array

if TYPE_CHECKING:
    from lily.model import Model
    from lily.session import Session


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is.

    Attributes:
        tokens: its ids.
        pieces: the text of each; replacement marks where it is part of a character.
        logprobs: log probability of each, given what is before it; None for a first token that has
            nothing before it.
        total: their sum.
        perplexity: exp of their negative mean; 1 where nothing was scored.
    """

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    total: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """A choice with its score.

    Attributes:
        index: its place among the choices.
        choice: as it was given.
        total: log probability of the whole choice after the prompt.
        mean: the same for each of its tokens.
        score: token by token.
    """

    index: int
    choice: str | Sequence[int]
    total: float
    mean: float
    score: Score


def score(
    model: Model,
    tokens: Sequence[int],
    after: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Work of `Model.score`."""
    ids, before = _ids(model, "text", tokens), _ids(model, "after", after)
    if not len(ids):
        raise ValueError("text: expected at least one token, found none")
    n = len(before) + len(ids)
    model._check_prompt(n, model.info.memory.native_context)
    with model.session(context=n) as session:
        first = None
        if len(before):
            report = progress and (lambda done, _: progress(done, n))
            first = np.asarray(session.prefill(before, progress=report))
        logprobs = _logprobs(
            session, ids, first, progress and (lambda done: progress(len(before) + done, n))
        )
    return _score(model, ids, logprobs)


def rank(
    model: Model,
    prompt: Sequence[int],
    choices: Sequence[str | Sequence[int]],
    by: Literal["total", "mean"] = "total",
) -> list[Ranked]:
    """Work of `Model.rank`."""
    if by not in ("total", "mean"):
        raise ValueError(f'by: {by!r}, expected "total" or "mean"')
    if not len(prompt):
        raise ValueError("prompt: expected at least one token, found none")
    if not len(choices):
        raise ValueError("choices: found none, expected at least one")
    encoded = [model.encode(c) if isinstance(c, str) else c for c in choices]
    ids = [_ids(model, f"choices[{i}]", tokens) for i, tokens in enumerate(encoded)]
    for i, tokens in enumerate(ids):
        if not len(tokens):
            raise ValueError(f"choices[{i}]: expected at least one token, found none")
    n = len(prompt) + max(map(len, ids))
    model._check_prompt(n, model.info.memory.native_context)
    ranked = []
    with model.session(context=n) as session:
        first = np.asarray(session.prefill(prompt))
        start = session.snapshot()
        for i, tokens in enumerate(ids):
            session.restore(start)
            found = _score(model, tokens, _logprobs(session, tokens, first))
            ranked.append(Ranked(i, choices[i], found.total, found.total / len(tokens), found))
    return sorted(ranked, key=lambda r: r.total if by == "total" else r.mean, reverse=True)


def _ids(model: Model, name: str, tokens: Sequence[int]) -> NDArray[np.uint32]:
    ids = token_array(tokens)
    outside = np.flatnonzero(ids >= model.n_tokens)
    if outside.size:
        at = int(outside[0])
        raise ValueError(f"{name}[{at}]: {ids[at]}, expected an id in [0, {model.n_tokens})")
    return ids


def _logprobs(
    session: Session,
    ids: NDArray[np.uint32],
    first: NDArray[np.float32] | None,
    progress: Callable[[int], Any] | None = None,
) -> list[float | None]:
    """Log probabilities of `ids` in `session`, which is left before the last of them. `first` are
    the logits before them, None at the beginning of a text."""
    n_tokens, n_vocabulary = session.model.n_tokens, session.model.info.config.vocab_size
    found: list[float | None] = [None]
    if first is not None:
        found = [*_row_logprobs(first[None, :n_tokens], ids[:1])]
    for a, b in chunks(0, len(ids) - 1, n_vocabulary):
        logits = session.score(ids[a:b])
        found += _row_logprobs(logits[:, :n_tokens], ids[a + 1 : b + 1])
        if progress is not None:
            progress(b + 1)
    return found


def _row_logprobs(logits: NDArray[np.float32], ids: NDArray[np.uint32]) -> list[float]:
    """Log probability of each row's id."""
    return [float(row[id]) - log_sum(row) for row, id in zip(logits, ids, strict=True)]


def _score(model: Model, ids: NDArray[np.uint32], logprobs: list[float | None]) -> Score:
    known = [p for p in logprobs if p is not None]
    total = math.fsum(known)
    tokenizer = model._tokenizer
    return Score(
        tokens=tuple(ids.tolist()),
        pieces=tuple(tokenizer.decode([id]) if tokenizer else "" for id in ids.tolist()),
        logprobs=tuple(logprobs),
        total=total,
        perplexity=exp(-total / len(known)) if known else 1.0,
    )
