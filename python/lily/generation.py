"""Streams of generated text: from drawn tokens to pieces, results and numbers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from lily.errors import Cancelled
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts.

    Attributes:
        prompt: tokens of the prompt.
        reused: those of them that the session already held.
        generated: tokens drawn, a natural end's token included.
        reuse_note: why not more was reused; "" if all that could be was.
    """

    prompt: int
    reused: int
    generated: int
    reuse_note: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and tokens per second; 0 where nothing was measured.

    Attributes:
        first_token_s: from the call to the first token.
        prefill_s, prefill_tok_s: the prompt tokens that were not reused.
        decode_s, decode_tok_s: the tokens after the first.
    """

    first_token_s: float
    prefill_s: float
    prefill_tok_s: float
    decode_s: float
    decode_tok_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    Attributes:
        text: the pieces joined.
        tokens: all drawn ids, a natural end's included.
        finish_reason: "stop" for a natural end or a stop string, "length" for max_tokens or the
            end of the context, "cancelled".
        stop: the stop string that was found, if one was.
        seed: what the random numbers came from.
        usage: token counts.
        timings: seconds and speeds.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None
    seed: int
    usage: Usage
    timings: Timings


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
        self._number = session.streams + 1
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
        session.streams = self._number

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
        if hasattr(self, "_number"):
            self.close()


class Generation:
    """Iterator over the pieces of a reply; also has `text()` and `result()`.

    The prompt is computed when iteration starts. Ctrl-C and leaving the loop stop it; the session
    stays usable.

    Attributes:
        session: where it runs.
        prompt: token ids of the prompt.
        sampling: how tokens are drawn.
    """

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop: str | Sequence[str],
        progress: Callable[[int, int], None] | None = None,
        *,
        owns_session: bool = False,
    ) -> None:
        if not prompt:
            raise ValueError("prompt: expected at least one token, found none")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens}, expected at least 1")
        StopStrings(stop)
        session.model._check_prompt(len(prompt), session.context)
        self.session = session
        self.prompt = prompt
        self.sampling = sampling
        self._max_tokens = max_tokens
        self._stop = stop
        self._progress = progress
        self._owns_session = owns_session
        self._pieces: list[str] = []
        self._reused = 0
        self._note = ""
        self._stream: Stream | None = None
        self._finish_reason: FinishReason | None = None
        self._started_at = self._prefilled_at = 0.0
        self._run = self._generate()

    def _generate(self) -> Iterator[Piece]:
        self._started_at = time.perf_counter()
        try:
            self._reused, self._note = reuse(self.session, self.prompt)
            try:
                self._prefill()
            except Cancelled:
                self._finish_reason = "cancelled"
                yield Piece("", None)
                return
            self._prefilled_at = time.perf_counter()
            self._stream = self.session.stream(self._max_tokens, self.sampling, self._stop)
            yield from self._stream
            self._finish_reason = self._stream.finish_reason
        finally:
            if self._stream is not None:
                self._stream.close()
            if self._finish_reason is None:
                self._finish_reason = "cancelled"
            if self._owns_session:
                self.session.close()

    def _prefill(self) -> None:
        """Compute what the session does not hold, with a snapshot where the last turn begins: the
        next prompt of a chat may differ after that point."""
        cancels = self.session.cancels
        edges = [self._reused, len(self.prompt)]
        boundary = self.session.model._turn_start(self.prompt)
        if not self._owns_session and edges[0] < boundary < edges[1]:
            edges.insert(1, boundary)
        for begin, end in pairwise(edges):
            if begin == boundary != self._reused:
                self.session._keep_snapshot()
            self.session.prefill(self.prompt[begin:end], progress=self._report(begin))
            if self.session.cancels != cancels:
                raise Cancelled("generate: cancelled")

    def _report(self, begin: int) -> Callable[[int, int], None] | None:
        progress, n = self._progress, len(self.prompt)
        return progress and (lambda done, _: progress(begin + done, n))

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Piece:
        piece = next(self._run)
        self._pieces.append(piece.text)
        return piece

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._finish_reason

    def text(self) -> str:
        """The whole text; runs to the end if need be."""
        return self.result().text

    def result(self) -> Result:
        """Text, tokens, finish reason, counts and timings; runs to the end if need be."""
        for _ in self:
            pass
        stream = self._stream
        tokens = tuple(stream.tokens) if stream else ()
        assert self._finish_reason is not None
        return Result(
            text="".join(self._pieces),
            tokens=tokens,
            finish_reason=self._finish_reason,
            stop=stream.stop if stream else None,
            seed=stream.seed if stream else 0,
            usage=Usage(len(self.prompt), self._reused, len(tokens), self._note),
            timings=self._timings(len(tokens)),
        )

    def _timings(self, n_generated: int) -> Timings:
        prefill_s = max(0.0, self._prefilled_at - self._started_at)
        n_prefill = len(self.prompt) - self._reused
        first = last = 0.0
        if self._stream:
            first, last = self._stream.first_token_at, self._stream.last_token_at
        decode_s = last - first
        return Timings(
            first_token_s=max(0.0, first - self._started_at),
            prefill_s=prefill_s,
            prefill_tok_s=n_prefill / prefill_s if prefill_s else 0.0,
            decode_s=decode_s,
            decode_tok_s=(n_generated - 1) / decode_s if decode_s > 0 else 0.0,
        )

    def close(self) -> None:
        """Stop; pieces so far stay available through `result()`."""
        self._run.close()  # type: ignore[attr-defined]
        if self._finish_reason is None:
            self._finish_reason = "cancelled"

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reuse(session: Session, prompt: list[int]) -> tuple[int, str]:
    """Bring `session` to the longest prefix of `prompt` that it can reach; at least one token of
    the prompt is always left to compute.

    Returns:
        How many tokens it then holds, and why not more.
    """
    if session.pending is not None:
        session.discard_pending()
    held = session.tokens
    common = 0
    for ours, theirs in zip(held, prompt[:-1], strict=False):
        if ours != theirs:
            break
        common += 1
    if common == len(held):
        return common, ""
    reached = session.rewind(common)
    note = f"the prompt leaves the session's text after {common} of its {len(held)} tokens"
    return reached, note
