"""How well a model foresees a text: teacher-forced perplexity, the work behind `lily perplexity`.

The text is cut into windows that do not overlap. Each window starts from an empty session, and
every token of it but the first is scored: its nats are -log p(token | the window's tokens before
it). A text of n tokens in windows of w thus has n - ceil(n / w) positions.

The softmax goes over all V rows of the logits, padding rows of the vocabulary included, as in
mlx-lm, transformers and llama.cpp, so that numbers compare. It is taken in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from lily.errors import ContextError, DeviceError
from lily.token_ids import Tokens, token_array

if TYPE_CHECKING:
    from lily.model import Model

WINDOW = 2048
"""Tokens of a window, if nothing else is asked for."""

SCORED_VALUES = 16 << 20
"""Most logits that are asked for at once: 64 MiB, 67 rows of the released vocabulary."""

BLOCK_VALUES = 1 << 20
"""Most logits that are widened to float64 at once."""


@dataclass(frozen=True)
class Perplexity:
    """What a text costs a model, in means over the scored positions.

    Attributes:
        perplexity: exp(nats_per_token).
        nats_per_token: mean of -log p(token | the tokens before it in its window).
        bits_per_byte: the same in bits, for each byte of text that the scored tokens stand for;
            None without a tokenizer, or if they stand for no text.
        positions: tokens that were scored.
        tokens: tokens that were read, the first of each window included.
        window: tokens of a window.
        seconds: what the model took.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float | None
    positions: int
    tokens: int
    window: int
    seconds: float

    @property
    def tok_s(self) -> float:
        """Positions a second."""
        return self.positions / self.seconds if self.seconds else math.inf

    def __str__(self) -> str:
        bits = "–" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        return "\n".join(
            [
                f"perplexity          {self.perplexity:.4f}",
                f"nats per token      {self.nats_per_token:.5f}",
                f"bits per byte       {bits}",
                f"positions           {self.positions:,}, in windows of {self.window:,} tokens",
                f"speed               {self.tok_s:.1f} tok/s",
            ]
        )


def perplexity(
    model: Model,
    text: str | Tokens,
    *,
    window: int | None = None,
    positions: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score each token of a text given those before it.

    The text is cut into windows that do not overlap. Each starts from an empty session, and every
    token of it but the first is scored. The softmax includes padding rows of the vocabulary, as
    other engines do.

    Args:
        model: what scores.
        text: text, in which spellings of special tokens are ordinary characters, or token ids.
        window: tokens of a window; None is 2,048, or the model's context if that is less.
        positions: stop after so many scored tokens; None goes on to the end.
        progress: called with (positions done, positions in all).

    Raises:
        ValueError: fewer than two tokens, an id or an option is out of range.
        ContextError: `window` is more than the model was trained for, or does not fit in memory.
        DeviceError: a logit is not a finite number.
    """
    if window is None:
        window = min(WINDOW, model.info.context)
    check_window(window, model.info.memory.native_context)
    ids = token_array(model.encode(text) if isinstance(text, str) else text)
    spans = windows(len(ids), window, positions)
    total = sum(stop - start - 1 for start, stop in spans)
    n_vocabulary = model.info.config.vocab_size
    outside = np.flatnonzero(ids >= n_vocabulary)
    if outside.size:
        at = int(outside[0])
        raise ValueError(f"tokens[{at}]: {ids[at]}, expected an id in [0, {n_vocabulary})")

    seconds = 0.0
    nats: list[float] = []
    with model.session(context=window) as session:
        for start, stop in spans:
            session.reset()
            for a, b in chunks(start, stop - 1, n_vocabulary):
                started = time.perf_counter()
                logits = session.score(ids[a:b])
                seconds += time.perf_counter() - started
                nats += token_nats(logits, ids[a + 1 : b + 1]).tolist()
                if progress is not None:
                    progress(len(nats), total)
    bad = next((i for i, value in enumerate(nats) if not math.isfinite(value)), None)
    if bad is not None:
        raise DeviceError(f"{model.info.device}: position {bad}: logits that are not finite")

    mean = math.fsum(nats) / total
    return Perplexity(
        perplexity=exp(mean),
        nats_per_token=mean,
        bits_per_byte=_bits_per_byte(model, ids, spans, mean * total),
        positions=total,
        tokens=total + len(spans),
        window=window,
        seconds=seconds,
    )


def check_window(window: int, native_context: int) -> None:
    """Refuse a window that has no position, or that the model was not made for."""
    if window < 2:
        raise ValueError(f"window: {window}, expected at least 2 tokens")
    if window > native_context:
        raise ContextError(
            f"window: {window} tokens, expected at most {native_context},"
            " which is what the model was trained for"
        )


def windows(n_tokens: int, window: int, positions: int | None = None) -> list[tuple[int, int]]:
    """[start, stop) of each window that has a position; the last is cut at the limit.

    Raises:
        ValueError: fewer than two tokens, or a limit below 1.
    """
    if positions is not None and positions < 1:
        raise ValueError(f"positions: {positions}, expected at least 1")
    if n_tokens < 2:
        raise ValueError(f"the text's tokens: {n_tokens}, expected at least 2")
    left = n_tokens if positions is None else positions
    found = []
    for start in range(0, n_tokens - 1, window):
        stop = min(start + window, n_tokens, start + left + 1)
        found.append((start, stop))
        left -= stop - start - 1
        if not left:
            break
    return found


def chunks(start: int, stop: int, n_vocabulary: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in pieces whose logits are no more than SCORED_VALUES."""
    rows = max(1, SCORED_VALUES // n_vocabulary)
    for a in range(start, stop, rows):
        yield a, min(a + rows, stop)


def blocks(logits: NDArray[np.float32]) -> Iterator[slice]:
    """Slices of rows that may be widened to float64 at once."""
    rows = max(1, BLOCK_VALUES // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def token_nats(logits: NDArray[np.float32], targets: NDArray[np.uint32]) -> NDArray[np.float64]:
    """-log p of each row's target: float64 [T] for logits [T, V]."""
    nats = np.empty(len(logits))
    for block in blocks(logits):
        rows = logits[block].astype(np.float64)
        nats[block] = log_sums(rows) - rows[np.arange(len(rows)), targets[block]]
    return nats


def log_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """log Σ exp of each row."""
    with np.errstate(invalid="ignore"):  # infinities become NaN, which callers look for
        most = rows.max(axis=1)
        sums = np.exp(rows - most[:, None]).sum(axis=1)
        return cast("NDArray[np.float64]", most + np.log(sums))


def exp(nats: float) -> float:
    """exp, infinite where it overflows."""
    return math.exp(nats) if nats < 709 else math.inf


def _bits_per_byte(
    model: Model, ids: NDArray[np.uint32], spans: Sequence[tuple[int, int]], nats: float
) -> float | None:
    tokenizer = model._tokenizer
    if tokenizer is None:
        return None
    n_bytes = sum(
        len(tokenizer.token_bytes(id))
        for start, stop in spans
        for id in ids[start + 1 : stop].tolist()
        if id < tokenizer.n_tokens
    )
    return nats / math.log(2) / n_bytes if n_bytes else None


def finite(value: Any) -> Any:
    """`value` for JSON, which knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
