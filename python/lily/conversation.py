"""A conversation on the terminal: the state behind `lily chat`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lily.arguments import sampling_options, system_message
from lily.reply import THINK, Part, ReplyParser
from lily.terminal import Bar, Output, note

if TYPE_CHECKING:
    from lily.generation import Result
    from lily.model import Model
    from lily.session import Session


class Chat:
    """A conversation in one session."""

    def __init__(self, model: Model, args: argparse.Namespace, bar: Bar) -> None:
        self._model = model
        self._args = args
        self._bar = bar
        self._options = sampling_options(args)
        self._session: Session = model.session()
        self._system = system_message(args)
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        self._turns = []
        self._session.reset()

    def undo(self) -> bool:
        """Drop the last question and answer; false if there are none."""
        had = bool(self._turns)
        self._turns = self._turns[:-2]
        return had

    def ask(self, text: str) -> None:
        """Answer `text`. After an error the conversation is what it was before."""
        from lily.errors import DeviceError

        messages = [*self._system, *self._turns, {"role": "user", "content": text}]
        try:
            reply = self._answer(messages)
        except DeviceError:
            self._session.close()
            self._session = self._model.session()
            raise
        finally:
            self._bar.clear()
        if reply.content or reply.reasoning:
            answer = {"role": "assistant", "content": reply.content}
            if reply.reasoning:
                answer["reasoning_content"] = reply.reasoning
            self._turns = [*self._turns, messages[-1], answer]

    def _answer(self, messages: list[dict[str, str]]) -> ReplyParser:
        args, output = self._args, Output()
        rendered = self._model.render_chat(messages, thinking=args.thinking)
        reply = ReplyParser(thinking=rendered.rstrip().endswith(THINK), stop=args.stop)
        reasons = False

        def show(parts: list[Part]) -> None:
            nonlocal reasons
            for part in parts:
                if part.content and reasons:
                    output.write("\n\n", dim=True)
                reasons = bool(part.reasoning)
                output.write(part.reasoning, dim=True)
                output.write(part.content)

        with (
            interrupts(self._session.cancel) as interrupted,
            self._session.generate(
                messages,
                max_tokens=args.max_tokens,
                thinking=args.thinking,
                progress=self._bar.prompt if self._bar.enabled else None,
                **self._options,
            ) as generation,
        ):
            try:
                for piece in generation:
                    self._bar.clear()
                    show(reply.push(piece.text))
                    if interrupted() or reply.stop is not None:
                        break
                show(reply.finish())
            finally:
                output.end()
            generation.close()
            self._remark(generation.result(), stopped=reply.stop is not None)
        return reply

    def _remark(self, result: Result, *, stopped: bool) -> None:
        if result.finish_reason == "length":
            full = result.usage.prompt + result.usage.generated >= self._session.context
            note("[the context is full; /reset starts over]" if full else "[cut at --max-tokens]")
        if result.finish_reason == "cancelled" and not stopped:
            note("[stopped]")
        if sys.stderr.isatty():
            u, t = result.usage, result.timings
            note(
                f"[{u.prompt} prompt tokens, {u.reused} reused; {u.generated} generated"
                + (f", {t.decode_tok_s:.1f} tok/s]" if t.decode_tok_s else "]")
            )


@contextlib.contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C calls `cancel`; if that does not help, a second one interrupts as usual."""
    seen = False

    def handle(*_: object) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        cancel()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
