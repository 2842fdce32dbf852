"""A conversation on the terminal: the state behind `lily chat`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lily.arguments import sampling_options, system_message
from lily.terminal import Bar, Output, note

if TYPE_CHECKING:
    from lily.generation import Result
    from lily.model import Model
    from lily.session import Session

OPEN, CLOSE = "<think>", "</think>"


class Reply:
    """Tells a reply's thinking from its answer while it comes.

    Args:
        thinking: the prompt ends inside a thought, so the reply begins there.
    """

    def __init__(self, thinking: bool) -> None:
        self.thought = self.answer = ""
        self._inside = thinking
        self._settled = thinking  # whether a thought may no longer be opened
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it is thought) that became certain."""
        self._held += text
        if not self._settled:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._held, self._inside = start.removeprefix(OPEN), True
            elif OPEN.startswith(start):
                return
            self._settled = True
        if self._inside:
            thought, closed, rest = self._held.partition(CLOSE)
            if not closed:
                keep = _overlap(thought, CLOSE)
                thought, rest = thought[: len(thought) - keep], thought[len(thought) - keep :]
            self._held = rest
            yield from self._add(thought, True)
            if not closed:
                return
            self._inside = False
        rest, self._held = self._held, ""
        yield from self._add(rest, False)

    def finish(self) -> Iterator[tuple[str, bool]]:
        """What was held back in case it grew into a tag."""
        rest, self._held = self._held, ""
        yield from self._add(rest, self._inside)

    def _add(self, text: str, thought: bool) -> Iterator[tuple[str, bool]]:
        so_far = self.thought if thought else self.answer
        text = text if so_far else text.lstrip("\n")
        if not text:
            return
        if thought:
            self.thought += text
        else:
            if not so_far and self.thought:
                yield "\n\n", True
            self.answer += text
        yield text, thought


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    return next(n for n in range(min(len(text), len(tag) - 1), -1, -1) if text.endswith(tag[:n]))


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
        if reply.answer or reply.thought:
            answer = {"role": "assistant", "content": reply.answer}
            if reply.thought:
                answer["reasoning_content"] = reply.thought
            self._turns = [*self._turns, messages[-1], answer]

    def _answer(self, messages: list[dict[str, str]]) -> Reply:
        args, output = self._args, Output()
        rendered = self._model.render_chat(messages, thinking=args.thinking)
        reply = Reply(thinking=rendered.rstrip().endswith(OPEN))
        with (
            interrupts(self._session.cancel) as interrupted,
            self._session.generate(
                messages,
                max_tokens=args.max_tokens,
                stop=args.stop,
                thinking=args.thinking,
                progress=self._bar.prompt if self._bar.enabled else None,
                **self._options,
            ) as generation,
        ):
            try:
                for piece in generation:
                    self._bar.clear()
                    for text, thought in reply.push(piece.text):
                        output.write(text, dim=thought)
                    if interrupted():
                        break
                for text, thought in reply.finish():
                    output.write(text, dim=thought)
            finally:
                output.end()
            generation.close()
            self._remark(generation.result())
        return reply

    def _remark(self, result: Result) -> None:
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
