"""A conversation on the terminal: the state behind `lily chat`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lily.arguments import sampling_options, system_message
from lily.terminal import Bar, Output, note, open_output

if TYPE_CHECKING:
    from lily.chat_reply import Reply, ReplyResult
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
        self._turns: list[dict[str, Any]] = []

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
            result = self._answer(messages)
        except DeviceError:
            self._session.close()
            self._session = self._model.session()
            raise
        finally:
            self._bar.clear()
        if result.content or result.reasoning:
            self._turns = [*self._turns, messages[-1], result.message()]

    def _answer(self, messages: list[dict[str, Any]]) -> ReplyResult:
        args, output = self._args, open_output(markdown=True)
        with self._model.chat(
            messages,
            session=self._session,
            max_tokens=args.max_tokens,
            stop=args.stop,
            thinking=args.thinking,
            progress=self._bar.prompt if self._bar.enabled else None,
            **self._options,
        ) as reply:
            with interrupts(reply.cancel) as interrupted:
                try:
                    write_reply(reply, output, self._bar, interrupted)
                finally:
                    output.end(stopped=interrupted())
            reply.close()
            result = reply.result()
        self._remark(result)
        return result

    def _remark(self, result: ReplyResult) -> None:
        if result.finish_reason == "length":
            full = result.usage.prompt + result.usage.generated >= self._session.context
            note("[the context is full; /reset starts over]" if full else "[cut at --max-tokens]")
        if result.finish_reason == "cancelled":
            note("[stopped]")
        if sys.stderr.isatty():
            u, t = result.usage, result.timings
            note(
                f"[{u.prompt} prompt tokens, {u.reused} reused; {u.generated} generated"
                + (f", {t.decode_tok_s:.1f} tok/s]" if t.decode_tok_s else "]")
            )


def write_reply(
    reply: Reply, output: Output, bar: Bar, stop: Callable[[], bool] = lambda: False
) -> None:
    """Write a reply as it comes, until `stop`: its thinking, an empty line, its answer."""
    thought = answered = False
    for piece in reply:
        bar.clear()
        output.write(piece.reasoning, dim=True)
        thought |= bool(piece.reasoning)
        if piece.content and thought and not answered:
            output.write("\n\n", dim=True)
        answered |= bool(piece.content)
        output.write(piece.content)
        if stop():
            return


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
