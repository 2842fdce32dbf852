"""A generation: a prompt, what was drawn after it, counts and times."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lily.asynchronous import Pieces
from lily.errors import Cancelled, DeviceError
from lily.reuse import Reuse, check_reuse, keep, keep_points, take_up
from lily.sampling import Sampling
from lily.stops import StopStrings
from lily.stream import FinishReason, Piece, Stream, TokenLogprob, check_logprobs
from lily.whole_numbers import check_whole

if TYPE_CHECKING:
    from lily.grammar import Constraint, Format
    from lily.session import Session


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts.

    Attributes:
        prompt: tokens of the prompt.
        reused: those of them that were not computed again.
        generated: tokens drawn, a natural end's token included.
        reuse_note: why not more was reused; "" if the session held no more, or there is no more.
        reasoning: of those generated, tokens of thinking in a reply.
    """

    prompt: int
    reused: int
    generated: int
    reuse_note: str = ""
    reasoning: int = 0


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
        logprobs: how likely each token was; None if that was not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None
    seed: int
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None

    def __repr__(self) -> str:
        return f"Result({shorten(self.text)}, {how_it_went(self)})"

    def _repr_html_(self) -> str:
        from lily.notebook import result_html

        return result_html(self)


def shorten(text: str, most: int = 60) -> str:
    """As a Python string, cut to be read at a glance."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def how_it_went(result: Any) -> str:
    """End, counts and speed of a `Result` or `ReplyResult`, for its `repr`."""
    usage, speed = result.usage, result.timings.decode_tok_s
    stop = f" at {result.stop!r}" if result.stop is not None else ""
    return (
        f"{result.finish_reason}{stop}, {usage.prompt} prompt tokens ({usage.reused} reused),"
        f" {usage.generated} generated" + (f" at {speed:.1f} tok/s" if speed else "")
    )


class Generation(Pieces[Piece]):
    """Iterator over the pieces of a text, for `for` and `async for`; also has `text()` and
    `result()`. Made by `Model.generate`.

    The prompt is computed when iteration starts. Ctrl-C, leaving the loop and `cancel` stop it; the
    session stays usable.

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
        format: Format | None = None,
        logprobs: int | None = None,
        reuse: Reuse = "any",
        owns_session: bool = False,
    ) -> None:
        if not prompt:
            raise ValueError("prompt: expected at least one token, found none")
        if max_tokens is not None:
            max_tokens = check_whole("max_tokens", max_tokens, 1)
        StopStrings(stop)
        check_logprobs(logprobs)
        self._logprobs = logprobs
        self._constraint = None if format is None else session.model._constraint(format)
        self._reuse = check_reuse(reuse)
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
        self._cancelled = False
        self._started_at = self._prefilled_at = 0.0
        self._run = Generation._generate(weakref.proxy(self))

    def _generate(self) -> Iterator[Piece]:
        self._started_at = time.perf_counter()
        self._cancels = self.session.cancels
        try:
            self._reused, self._note = take_up(self.session, self.prompt, self._reuse)
            try:
                self._check_cancelled()
                self._prefill()
            except Cancelled:
                self._finish_reason = "cancelled"
                yield Piece("", None)
                return
            self._prefilled_at = time.perf_counter()
            self._stream = self.session.stream(
                self._max_tokens,
                self.sampling,
                self._stop,
                constraint=self._constraint,
                logprobs=self._logprobs,
            )
            for piece in self._stream:
                self._pieces.append(piece.text)
                yield piece
            self._finish_reason = self._finish_reason or self._stream.finish_reason
        finally:
            if self._stream is not None:
                self._stream.close()
            if self._finish_reason is None:
                self._finish_reason = "cancelled"
            if self._owns_session:
                self._leave_session()

    def _prefill(self) -> None:
        """Compute what the session does not hold, and keep states that later prompts may share:
        the next one of a chat may differ after the start of the last turn."""
        session, n = self.session, len(self.prompt)
        stores, holds = self._reuse != "off", not self._owns_session
        points, turn = keep_points(session, self.prompt, self._reused, stores=stores, holds=holds)
        session._live().reserve(n - self._reused)
        for begin, end in pairwise([self._reused, *points, n]):
            session.prefill(self.prompt[begin:end], progress=self._report(begin))
            self._check_cancelled()
            if end < n:
                keep(session, store=stores, holds=holds and end == turn)

    def _check_cancelled(self) -> None:
        if self._cancelled or self.session.cancels != self._cancels:
            raise Cancelled("generate: cancelled")

    def _leave_session(self) -> None:
        """Close the session that was made for this call; its last state may be of use to others."""
        if self._reuse != "off" and self.session._core is not None:
            with contextlib.suppress(DeviceError):
                self.session.discard_pending()
                keep(self.session)
        self.session.close()

    def _report(self, begin: int) -> Callable[[int, int], None] | None:
        progress, n = self._progress, len(self.prompt)
        return progress and (lambda done, _: progress(begin + done, n))

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._finish_reason or (self._stream.finish_reason if self._stream else None)

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
            logprobs=None if self._logprobs is None else tuple((stream and stream.logprobs) or ()),
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

    async def aresult(self) -> Result:
        """As `result`, without blocking the loop."""
        return await self._await(self.result)

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self._started_at else "not begun")
        text = "".join(self._pieces)
        return f"Generation({len(self.prompt)} prompt tokens, {state}: {shorten(text)})"

    def stop(self) -> None:
        """End the text here: it is complete."""
        if self._stream is not None and self._finish_reason is None:
            self._stream.close()
            self._finish_reason = "stop"

    def force(self, tokens: Sequence[int]) -> None:
        """Let the next tokens be these. As `Stream.force`; the text must have begun."""
        if self._stream is not None:
            self._stream.force(tokens)

    def constrain(self, constraint: Constraint) -> None:
        """Draw only what `constraint` allows from here on."""
        self._constraint = constraint
        if self._stream is not None:
            self._stream.constrain(constraint)

    def cancel(self) -> None:
        if self._finish_reason is not None:
            return
        self._cancelled = True
        if not self._started_at or (self._stream is not None and not self._stream.is_running):
            return  # what runs in the session, if anything, is not this
        with contextlib.suppress(ValueError):  # closed: nothing runs
            self.session.cancel()

    def close(self) -> None:
        """Stop; pieces so far stay available through `result()`."""
        self._end()
        if self._finish_reason is None:
            self._finish_reason = "cancelled"
        if self._owns_session:
            self.session.close()
