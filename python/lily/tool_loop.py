"""A conversation in which the model calls Python functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lily.asynchronous import in_thread
from lily.chat_reply import Reply, ReplyPiece, ReplyResult
from lily.errors import Cancelled
from lily.reply import ToolCall
from lily.tools import call_function, function_tool
from lily.whole_numbers import check_whole

if TYPE_CHECKING:
    from lily.chat import Message
    from lily.model import Model

Function = Callable[..., Any]
OnPiece = Callable[[ReplyPiece], object]


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A conversation after the model needed no further call, or was not given another round.

    Attributes:
        messages: all of it: what was given, each reply, each function's answer.
        replies: the model's, in order.
    """

    messages: tuple[Message, ...]
    replies: tuple[ReplyResult, ...]

    @property
    def result(self) -> ReplyResult:
        """The last reply."""
        return self.replies[-1]

    def __str__(self) -> str:
        return self.result.content


class ToolLoop:
    """Asks, calls, tells the answers, and asks again.

    Attributes:
        cancelled: whether `cancel` was called.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Message],
        functions: Sequence[Function],
        max_rounds: int,
        on_piece: OnPiece | None,
        options: dict[str, Any],
    ) -> None:
        check_whole("max_rounds", max_rounds, 1)
        self._model = model
        self._messages: list[Message] = list(messages)
        for function in functions:
            if inspect.iscoroutinefunction(function):
                raise ValueError(
                    f"functions: {function.__name__} is asynchronous, expected arun_tools for it"
                )
        self._tools = [function_tool(function) for function in functions]
        self._functions = {
            tool.name: function for tool, function in zip(self._tools, functions, strict=True)
        }
        self._max_rounds = max_rounds
        self._on_piece = on_piece
        self._options = options
        self._reply: Reply | None = None
        self.cancelled = False

    def run(self) -> ToolRun:
        replies: list[ReplyResult] = []
        while True:
            replies.append(self._ask())
            self._messages.append(replies[-1].message())
            if replies[-1].finish_reason != "tool_calls" or len(replies) == self._max_rounds:
                break
            for call in replies[-1].tool_calls:
                self._messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": self._answer(call)}
                )
        return ToolRun(tuple(self._messages), tuple(replies))

    def _ask(self) -> ReplyResult:
        with self._model.chat(self._messages, tools=self._tools, **self._options) as reply:
            self._reply = reply
            if self.cancelled:
                reply.cancel()
            for piece in reply:
                if self._on_piece is not None:
                    self._on_piece(piece)
            return reply.result()

    def _answer(self, call: ToolCall) -> str:
        """What the function says, or what went wrong, for the model to read."""
        if self.cancelled:
            raise Cancelled("run_tools: cancelled")
        function = self._functions.get(call.name)
        if function is None:
            return f"error: no function {call.name}, expected one of {', '.join(self._functions)}"
        return call_function(function, call.arguments)

    def cancel(self) -> None:
        """Stop the reply that runs; no function is called any more. From any thread."""
        self.cancelled = True
        if self._reply is not None:
            self._reply.cancel()


async def in_loop(
    model: Model,
    messages: Sequence[Message],
    functions: Sequence[Function],
    max_rounds: int,
    on_piece: OnPiece | None,
    options: dict[str, Any],
) -> ToolRun:
    """The loop in a thread of its own; coroutine functions run in the caller's event loop."""
    import asyncio  # loads the network modules

    loop = asyncio.get_running_loop()
    waits: set[Future[Any]] = set()  # for coroutine functions

    def bridged(function: Function) -> Function:
        if not inspect.iscoroutinefunction(function):
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop)
            waits.add(answer)
            if run.cancelled:  # before it was among them
                answer.cancel()
            try:
                return answer.result()
            finally:
                waits.discard(answer)

        return call

    run = ToolLoop(model, messages, [bridged(f) for f in functions], max_rounds, on_piece, options)

    def cancel() -> None:
        run.cancel()
        for answer in list(waits):
            answer.cancel()

    return await in_thread(run.run, cancel)
