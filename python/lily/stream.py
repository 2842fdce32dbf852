"""Streams: drawn tokens, one after another, as pieces of text.

As long as nothing has to be known or decided between two tokens, a stream leaves the loop to the
core, which keeps two steps in flight. A constraint, log probabilities and tokens that the caller
forces need the logits, or the choice, in between: the stream then takes single steps. Their numbers
are those of the loop, and random numbers depend on the position only, so both draw the same tokens.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.errors import Error
from lily.sampling import Sampling
from lily.stops import StopStrings
from lily.whole_numbers import check_whole

if TYPE_CHECKING:
    from lily.grammar import Constraint
    from lily.session import Session
    from lily.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]

MOST_LOGPROBS = 20
"""Most alternatives whose log probabilities are told for each token."""

UNLIMITED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was: log-softmax of the model's logits over the real tokens, before bias,
    masks, penalties and temperature.

    Attributes:
        token: its id.
        text: what it stands for; replacement marks where it is part of a character.
        bytes: the same, exactly.
        logprob: its log probability.
        top: id, text and log probability of the likeliest tokens, best first.
    """

    token: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one drawn token added.

    Attributes:
        text: whole characters that became certain; often a word, sometimes nothing.
        token: the token's id; None for the last piece, which may hold text that was kept back.
        logprob: how likely the token was, if that was asked for.
    """

    text: str
    token: int | None
    logprob: TokenLogprob | None = None

    def __str__(self) -> str:
        return self.text


class Stream:
    """Iterator over the pieces of a text that a session draws. Made by `Session.stream`.

    Leaving the loop early, `close()`, or any other call to the session stops it; the session then
    stands right after the tokens that were returned, with the last one pending.

    Attributes:
        tokens: ids so far, drawn or forced, a natural end's included.
        logprobs: how likely each of them was; None if that was not asked for.
        seed: what the random numbers come from.
        finish_reason: why it ended; None while it runs.
    """

    def __init__(
        self,
        session: Session,
        max_tokens: int | None,
        sampling: Sampling,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        *,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> None:
        if max_tokens is not None:
            max_tokens = check_whole("max_tokens", max_tokens, 1)
        check_logprobs(logprobs)
        model = session.model
        self._session = session
        self._stops = StopStrings(stop)
        self._stop_ids = model.stop_ids if stop_ids is None else frozenset(stop_ids)
        self._decoder: StreamDecoder | None = model._stream_decoder()
        self._most = UNLIMITED if max_tokens is None else min(max_tokens, UNLIMITED)
        self._constraint = constraint
        self._n_top = logprobs
        self._forced: deque[int] = deque()
        self._pipelined = True  # the core has been started for all the tokens that are left
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.first_token_at = self.last_token_at = 0.0
        self._draw: dict[str, Any] = {
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_k": min(sampling.top_k, 0xFFFFFFFF),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition": sampling.repetition_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
            "seed": self.seed,
        }
        self._bias = _bias(sampling, model.info.config.vocab_size)
        self._cancels = session.cancels
        self._start(session._live(), self._most)
        # Only a stream that began has a number: one that was refused must end no other.
        session.streams += 1
        self._number = session.streams

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        if self.finish_reason is not None:
            raise StopIteration
        core = self._session._live()
        if not self.is_running or self._session.cancels != self._cancels:
            return self._end("cancelled")
        if not self._forced and self._constraint is not None and self._constraint.finished:
            return self._end("stop")
        full = core.pending is not None and core.position >= core.context
        if full or len(self.tokens) >= self._most:
            return self._end("length")
        token, logprob = self._next_token(core)
        if token is None:
            return self._end("cancelled")
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        self.tokens.append(token)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if token in self._stop_ids:
            return self._end("stop")
        text = self._decoder.push(token) if self._decoder else ""
        text = self._stops.push(text)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            core.stop()
        return Piece(text, token, logprob)

    def force(self, tokens: Sequence[int]) -> None:
        """Let the next tokens be these, then go on drawing.

        They are part of the text as if they had been drawn: the iterator returns them one by one,
        penalties and `max_tokens` count them, a stop string or a stop id among them ends the text.

        Args:
            tokens: ids in [0, n_tokens); they come after those of earlier calls.

        Raises:
            ValueError: an id is out of range, or the constraint does not allow it.
        """
        n = self._session.model.n_tokens
        for i, token in enumerate(tokens):
            if not 0 <= token < n:
                raise ValueError(f"tokens[{i}]: {token}, expected an id in [0, {n})")
        for token in tokens:
            if self._constraint is not None and token not in self._stop_ids:
                self._constraint.accept(token)
            self._forced.append(int(token))

    def constrain(self, constraint: Constraint) -> None:
        """Draw only what `constraint` allows from here on. Tokens that `force` has been given
        before are not shown to it."""
        self._constraint = constraint

    def _next_token(self, core: _core.Session) -> tuple[int | None, TokenLogprob | None]:
        """Draw a token, or take a forced one; None where the session was cancelled."""
        if self._constraint is None and self.logprobs is None and not self._forced:
            if not self._pipelined:
                self._start(core, self._most - len(self.tokens))
                self._pipelined = True
            return core.next(), None
        self._pipelined = False
        if core.pending is not None:
            core.advance()
        logits = None if self.logprobs is None else core.logits()
        token: int | None
        if self._forced:
            token = self._forced.popleft()
            core.force(token)
        else:
            self._start(core, 1)
            token = core.next()
            if token is not None and self._constraint and token not in self._stop_ids:
                self._constraint.accept(token)
        if token is None or logits is None:
            return token, None
        model = self._session.model
        return token, token_logprob(
            logits[: model.n_tokens], token, self._n_top or 0, model._tokenizer
        )

    def _start(self, core: _core.Session, max_tokens: int) -> None:
        """Let the core draw so many tokens, under bias and constraint."""
        ids, values = self._bias
        if self._constraint is not None:
            banned = _banned(self._constraint, self._session.model.n_tokens)
            ids = np.concatenate([ids, banned])
            values = np.concatenate([values, np.full(len(banned), -np.inf, np.float32)])
        core.start(**self._draw, bias_ids=ids, bias=values, max_tokens=max_tokens)

    @property
    def is_running(self) -> bool:
        """Whether the session still draws for this stream: another call may have ended it."""
        session = self._session
        return (
            session._core is not None
            and session.streams == self._number
            and session._core.streaming
        )

    def _end(self, reason: FinishReason) -> Piece:
        self.finish_reason = reason
        if self.is_running:
            self._session._live().stop()
        rest = self._stops.push(self._decoder.finish()) if self._decoder else ""
        return Piece(rest + self._stops.finish(), None)

    def close(self) -> None:
        """Stop drawing. The stream counts as cancelled if it had not ended."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if self.is_running:
                self._session._live().stop()

    def __repr__(self) -> str:
        state = self.finish_reason or "running"
        return f"Stream({len(self.tokens)} tokens, {state}, seed={self.seed})"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A step that failed in flight cost the session its state: the session will say so.
        if hasattr(self, "_number"):
            with suppress(Error):
                self.close()


def check_logprobs(logprobs: int | None) -> None:
    """Refuse a number of alternatives that is out of range."""
    if logprobs is not None:
        check_whole("logprobs", logprobs, 0, MOST_LOGPROBS)


def token_logprob(
    logits: NDArray[np.float32], token: int, n_top: int, tokenizer: Tokenizer | None
) -> TokenLogprob:
    """How likely `token` was, and the `n_top` likeliest, under float32 [n_tokens] logits."""
    total = log_sum(logits)

    def spelling(id: int) -> bytes:
        return tokenizer.token_bytes(id) if tokenizer else b""

    def logprob(id: int) -> float:
        return float(logits[id]) - total

    best: list[int] = []
    if n_top:
        n_top = min(n_top, len(logits))
        candidates = np.flatnonzero(logits >= np.partition(logits, -n_top)[-n_top])
        order = np.argsort(-logits[candidates], kind="stable")
        best = candidates[order][:n_top].tolist()
    own = spelling(token)
    return TokenLogprob(
        token=token,
        text=own.decode("utf-8", "replace"),
        bytes=own,
        logprob=logprob(token),
        top=tuple((id, spelling(id).decode("utf-8", "replace"), logprob(id)) for id in best),
    )


def log_sum(logits: NDArray[np.float32]) -> float:
    """log Σ exp of a row of logits; the exponentials in float32, their sum in float64."""
    most = logits.max()
    return float(most) + float(np.log(np.exp(logits - most).sum(dtype=np.float64)))


def _bias(sampling: Sampling, n_vocabulary: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Ids and values of the logit bias, bans as -inf."""
    banned = sampling.banned_ids
    for id in sampling.logit_bias:
        if id >= n_vocabulary:
            raise ValueError(f"logit_bias: token {id}, expected below {n_vocabulary}")
    values = [-np.inf if i in banned else b for i, b in sampling.logit_bias.items()]
    return np.array(list(sampling.logit_bias), np.uint32), np.array(values, np.float32)


def _banned(constraint: Constraint, n_tokens: int) -> NDArray[np.uint32]:
    """The ids that `constraint` does not allow next."""
    bits = constraint.allowed().astype("<u4", copy=False).view(np.uint8)
    allowed = np.unpackbits(bits, count=n_tokens, bitorder="little")
    if not allowed.any():
        raise ValueError("constraint: allows no token, expected at least one")
    return np.flatnonzero(allowed == 0).astype(np.uint32)
