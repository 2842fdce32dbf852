"""Streams: drawn tokens, one after another, as pieces of text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lily.errors import Error
from lily.sampling import Sampling
from lily.stops import StopStrings

if TYPE_CHECKING:
    from lily.session import Session
    from lily.tokenizer import StreamDecoder

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one drawn token added.

    Attributes:
        text: whole characters that became certain; often a word, sometimes nothing.
        token: the token's id; None for the last piece, which may hold text that was kept back.
    """

    text: str
    token: int | None

    def __str__(self) -> str:
        return self.text


class Stream:
    """Iterator over the pieces of a text that a session draws. Made by `Session.stream`.

    Leaving the loop early, `close()`, or any other call to the session stops it; the session then
    stands right after the tokens that were returned, with the last one pending.

    Attributes:
        tokens: ids drawn so far, a natural end's included.
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
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens}, expected at least 1")
        model = session.model
        self._session = session
        self._stops = StopStrings(stop)
        self._stop_ids = model.stop_ids if stop_ids is None else frozenset(stop_ids)
        self._decoder: StreamDecoder | None = model._stream_decoder()
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.first_token_at = self.last_token_at = 0.0
        greedy = sampling.is_greedy
        banned = sampling.banned_ids
        session._live().start(
            temperature=0.0 if greedy else sampling.temperature,
            top_k=min(sampling.top_k, 0xFFFFFFFF),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            seed=self.seed,
            bias=[(i, float("-inf") if i in banned else b) for i, b in sampling.logit_bias.items()],
            max_tokens=0xFFFFFFFF if max_tokens is None else min(max_tokens, 0xFFFFFFFF),
        )
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
        if not self._is_running():
            return self._end("cancelled")
        token = core.next()
        if token is None:
            return self._end("cancelled" if core.cancelled else "length")
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        self.tokens.append(token)
        if token in self._stop_ids:
            return self._end("stop")
        text = self._decoder.push(token) if self._decoder else ""
        text = self._stops.push(text)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            core.stop()
        return Piece(text, token)

    def _is_running(self) -> bool:
        """Whether the session still draws for this stream: another call may have ended it."""
        session = self._session
        return (
            session._core is not None
            and session.streams == self._number
            and session._core.streaming
        )

    def _end(self, reason: FinishReason) -> Piece:
        self.finish_reason = reason
        if self._is_running():
            self._session._live().stop()
        rest = self._stops.push(self._decoder.finish()) if self._decoder else ""
        return Piece(rest + self._stops.finish(), None)

    def close(self) -> None:
        """Stop drawing. The stream counts as cancelled if it had not ended."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if self._is_running():
                self._session._live().stop()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A step that failed in flight cost the session its state: the session will say so.
        if hasattr(self, "_number"):
            with suppress(Error):
                self.close()
