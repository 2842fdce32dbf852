"""A model that says what a test tells it to, when the test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from lily.errors import Cancelled, ContextError
from lily.generation import Timings
from lily.sampling import Sampling

CONTEXT = 1000


def piece(
    content: str = "",
    *,
    reasoning: str = "",
    call: tuple[int, str, str, str] | None = None,
    logprob: Any = None,
) -> Any:
    """A `ReplyPiece`; `call` is (index, id, name, arguments)."""
    part = call and SimpleNamespace(index=call[0], id=call[1], name=call[2], arguments=call[3])
    return SimpleNamespace(
        reasoning=reasoning, content=content, text=content, call=part, token=1, logprob=logprob
    )


def logprob(text: str, value: float, top: tuple[tuple[int, str, float], ...] = ()) -> Any:
    return SimpleNamespace(token=1, text=text, bytes=text.encode(), logprob=value, top=top)


Step = Any  # a piece; an exception, to be raised; or a function of the reply, to be called


class ScriptedReply:
    """Plays steps in order; a function among them is called on the way."""

    def __init__(self, model: ScriptedModel, steps: Sequence[Step], arguments: dict[str, Any]):
        self.model = model
        self.arguments = arguments
        self.cancelled = threading.Event()
        self.closed = False
        self._steps = list(steps)
        self._pieces: list[Any] = []
        self._reason = "cancelled"

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            if self.cancelled.is_set():
                return
            if isinstance(step, BaseException):
                raise step
            if callable(step):
                step(self)
                continue
            self._pieces.append(step)
            yield step
        if not self.cancelled.is_set():
            self._reason = "tool_calls" if any(p.call for p in self._pieces) else "stop"

    def compute(self, done: int, total: int) -> None:
        """Report a chunk of the prompt, as a model does."""
        self.arguments["progress"](done, total)

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.model.closed += 1

    def result(self) -> Any:
        content = "".join(p.content for p in self._pieces)
        calls: dict[int, Any] = {}
        for call in (p.call for p in self._pieces if p.call):
            known = calls.setdefault(
                call.index, SimpleNamespace(id=call.id, name=call.name, arguments_json="")
            )
            known.arguments_json += call.arguments
        n = len(self._pieces)
        return SimpleNamespace(
            content=content,
            text=content,
            reasoning="".join(p.reasoning for p in self._pieces),
            tool_calls=tuple(calls.values()),
            finish_reason=self._reason,
            thinking_end=None,
            stop=None,
            seed=7,
            sampling=self.arguments["sampling"],
            logprobs=tuple(p.logprob for p in self._pieces if p.logprob),
            usage=SimpleNamespace(prompt=5, reused=0, generated=n, reasoning=0, reuse_note=""),
            timings=Timings(0.1, 0.1, 50.0, 0.1, 40.0),
        )


class ScriptedModel:
    """Stands in for `lily.Model`.

    Args:
        steps: what each reply plays, or a function from the call's arguments to it.

    Attributes:
        calls: arguments of `chat` and `generate` so far.
        replies: what they returned.
        closed: replies that were closed.
    """

    def __init__(self, steps: Sequence[Step] | Callable[[dict[str, Any]], Sequence[Step]] = ()):
        self.steps = steps
        self.calls: list[dict[str, Any]] = []
        self.replies: list[ScriptedReply] = []
        self.closed = 0
        self.n_tokens = 256
        self.sampling = Sampling(temperature=0.6, top_k=20)
        self.info = SimpleNamespace(context=CONTEXT, device="script", precision="fast")

    def _reply(self, arguments: dict[str, Any]) -> ScriptedReply:
        self.calls.append(arguments)
        steps = self.steps(arguments) if callable(self.steps) else self.steps
        reply = ScriptedReply(self, steps, arguments)
        self.replies.append(reply)
        return reply

    def chat(self, **arguments: Any) -> ScriptedReply:
        text = "".join(str(m.get("content")) for m in arguments["messages"])
        if len(text) > CONTEXT:
            raise ContextError(f"prompt: {len(text)} tokens, expected at most {CONTEXT}")
        return self._reply(arguments)

    def generate(self, **arguments: Any) -> ScriptedReply:
        return self._reply(arguments)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        if any(not 0 <= token < 256 for token in tokens):
            raise ValueError("tokens: expected ids below 256")
        return bytes(tokens).decode("utf-8", "replace")

    def render_chat(self, messages: Any, **_: Any) -> str:
        return repr(messages)

    def encode_chat(self, messages: Any, **_: Any) -> list[int]:
        return list(repr(messages).encode())


def wait_for(event: threading.Event) -> Callable[[ScriptedReply], None]:
    """A step that waits until a test sets `event`, or the reply is cancelled."""

    def step(reply: ScriptedReply) -> None:
        while not event.wait(0.005):
            if reply.cancelled.is_set():
                return

    return step


def prefill(chunks: int, event: threading.Event) -> Callable[[ScriptedReply], None]:
    """A step that computes a long prompt: `chunks` chunks, then on until `event`."""

    def step(reply: ScriptedReply) -> None:
        done = 0
        while done < chunks or not event.wait(0.005):
            done = min(done + 1, chunks)
            try:
                reply.compute(done, chunks)
            except Cancelled:
                reply.cancel()
                return

    return step
