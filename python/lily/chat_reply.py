"""The reply to a chat: thinking, answer and tool calls, told apart while they come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lily.asynchronous import Pieces
from lily.generation import Generation, Timings, Usage, how_it_went, shorten
from lily.grammar import Constraint, compile_format, tool_call_grammar
from lily.reply import CALL, THINK, THINK_END, Part, ReplyParser, ToolCall, ToolCallPiece
from lily.sampling import BAN, Sampling
from lily.stream import Piece, TokenLogprob
from lily.tools import check_tool_choice, parse_tools

if TYPE_CHECKING:
    from lily.chat import Message
    from lily.model import Model
    from lily.session import Session

ReplyEnd = Literal["stop", "length", "tool_calls", "cancelled"]
ThinkingEnd = Literal["closed", "budget", "asked"]

CLOSE_THINKING = f"\n{THINK_END}\n\n"
"""What ends thinking that is cut short; the answer follows."""


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """What one drawn token added to a reply; most have one part, some none.

    Attributes:
        reasoning: text of the thinking.
        content: text of the answer.
        call: part of a tool call.
        token: the token's id; None where one token gave several pieces, and for text held back.
        logprob: the token's log probability, if asked for.
    """

    reasoning: str = ""
    content: str = ""
    call: ToolCallPiece | None = None
    token: int | None = None
    logprob: TokenLogprob | None = None

    def __str__(self) -> str:
        return self.content


@dataclass(frozen=True, slots=True)
class ReplyResult:
    """A finished reply.

    Attributes:
        content: the answer.
        reasoning: the thinking before it.
        tool_calls: complete calls, in order; a call that was cut is not among them.
        finish_reason: "stop" for a natural end or a stop string, "tool_calls" for a natural end
            with calls, "length" for max_tokens or the end of the context, "cancelled".
        thinking_end: how thinking ended: "closed" by the model, by its "budget", or "asked" for by
            `Reply.stop_thinking`; None if there was none, or it did not end.
        stop: the stop string that was found, if one was.
        seed: what the random numbers came from.
        tokens: all drawn ids, a natural end's included.
        sampling: how they were drawn.
        usage: token counts.
        timings: seconds and speeds.
        logprobs: of each drawn token, if asked for.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ReplyEnd
    thinking_end: ThinkingEnd | None
    stop: str | None
    seed: int
    tokens: tuple[int, ...]
    sampling: Sampling
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None

    def message(self) -> dict[str, Any]:
        """The reply as a message, to go on with the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in self.tool_calls
            ]
        return message

    def __str__(self) -> str:
        return self.content

    def __repr__(self) -> str:
        calls = "".join(f", calls {call.name}" for call in self.tool_calls)
        thought = f", {self.usage.reasoning} for thinking" if self.reasoning else ""
        return f"ReplyResult({shorten(self.content)}{calls}, {how_it_went(self)}{thought})"

    def _repr_html_(self) -> str:
        from lily.notebook import result_html

        return result_html(self)


class Reply(Pieces[ReplyPiece]):
    """Iterator over the pieces of a reply, for `for` and `async for`; also has `text()` and
    `result()`. Made by `Model.chat`.

    The prompt is computed when iteration starts. Ctrl-C, leaving the loop and `cancel` stop it.

    Attributes:
        session: where it runs.
        prompt: token ids of the prompt.
        sampling: how tokens are drawn.
    """

    def __init__(
        self,
        generation: Generation,
        parser: ReplyParser,
        *,
        budget: int | None = None,
        constraint: Constraint | None = None,
        one_call: bool = False,
    ) -> None:
        self.session: Session = generation.session
        self.prompt = generation.prompt
        self.sampling = generation.sampling
        self._generation = generation
        self._parser = parser
        self._budget = budget
        self._constraint = constraint
        self._one_call = one_call
        self._thought = 0  # tokens of thinking, the closing tag's included
        self._asked = False
        self._thinking_end: ThinkingEnd | None = None
        self._run = Reply._pieces(weakref.proxy(self))

    def _pieces(self) -> Iterator[ReplyPiece]:
        parser, generation = self._parser, self._generation
        if not parser.in_thinking:
            self._constrain()
        for piece in generation:
            thinking = parser.in_thinking
            parts = parser.push(piece.text)
            if piece.token is None:
                parts += parser.finish(cut=generation.finish_reason != "stop")
            self._thought += thinking and piece.token is not None
            yield from _reply_pieces(parts, piece)
            if parser.stop is not None or (self._one_call and parser.calls):
                generation.stop()
            elif parser.in_thinking:
                self._limit_thinking()
            elif thinking:
                self._thinking_end = self._thinking_end or "closed"
                self._constrain()

    def _limit_thinking(self) -> None:
        """Close a thought that has used its budget, or that nobody wants to wait for."""
        if self._thinking_end is not None:
            return
        if self._asked or (self._budget is not None and self._thought >= self._budget):
            self._thinking_end = "asked" if self._asked else "budget"
            self._force(CLOSE_THINKING)

    def _constrain(self) -> None:
        """Hold what follows to the format; thinking before it was free."""
        constraint, self._constraint = self._constraint, None
        if constraint is not None:
            if self._thinking_end == "closed":
                self._force(CLOSE_THINKING.partition(THINK_END)[2])
            self._generation.constrain(constraint)

    def _force(self, text: str) -> None:
        self._generation.force(self.session.model.encode(text, special=True))

    @property
    def finish_reason(self) -> ReplyEnd | None:
        """Why it ended; None while it runs."""
        reason = self._generation.finish_reason
        return "tool_calls" if reason == "stop" and self._parser.calls else reason

    def stop_thinking(self) -> None:
        """Close the thinking at the next token and go on with the answer. From any thread."""
        self._asked = True

    def cancel(self) -> None:
        self._generation.cancel()

    def close(self) -> None:
        """Stop; what came so far stays available through `result()`."""
        self._end()
        self._generation.close()

    def text(self) -> str:
        """The whole answer; runs to the end if need be."""
        return self.result().content

    def result(self) -> ReplyResult:
        """All of it; runs to the end if need be."""
        for _ in self:
            pass
        done, parser = self._generation.result(), self._parser
        assert self.finish_reason is not None
        return ReplyResult(
            content=parser.content,
            reasoning=parser.reasoning,
            tool_calls=tuple(parser.calls),
            finish_reason=self.finish_reason,
            thinking_end=self._thinking_end,
            stop=parser.stop,
            seed=done.seed,
            tokens=done.tokens,
            sampling=self.sampling,
            usage=replace(done.usage, reasoning=self._thought),
            timings=done.timings,
            logprobs=done.logprobs,
        )

    async def aresult(self) -> ReplyResult:
        """As `result`, without blocking the loop."""
        return await self._await(self.result)

    def __repr__(self) -> str:
        state = self.finish_reason or ("thinking" if self._parser.in_thinking else "running")
        text = shorten(self._parser.content)
        return f"Reply({len(self.prompt)} prompt tokens, {state}: {text})"


def _reply_pieces(parts: list[Part], piece: Piece) -> Iterator[ReplyPiece]:
    """The parts that a drawn token gave; the first carries the token."""
    token, logprob = piece.token, piece.logprob
    for part in parts:
        yield ReplyPiece(part.reasoning, part.content, part.call, token, logprob)
        token = logprob = None
    if token is not None:
        yield ReplyPiece(token=token, logprob=logprob)


def open_reply(
    model: Model,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None,
    tool_choice: Any,
    parallel_tool_calls: bool,
    thinking: bool | int | None,
    format: Any,
    template: Mapping[str, Any] | None,
    sampling: Sampling,
    session: Session | None,
    max_tokens: int | None,
    stop: str | Sequence[str],
    **options: Any,
) -> Reply:
    """What `Model.chat` does: everything is checked before a session is made."""
    known = parse_tools(tools)
    choice = check_tool_choice(tool_choice, known)
    callable_ = [tool for tool in known if choice.name in (None, tool.name)]
    budget = _budget(thinking)
    if known and choice.mode == "none":
        callable_, sampling = [], _without_calls(model, sampling)
    elif choice.mode == "required":
        if format is not None:
            raise ValueError(f"format: does not go with tool_choice {choice.name or 'required'!r}")
        format = tool_call_grammar([tool.spec() for tool in callable_], model.tokenizer)
    elif known and format is not None:
        raise ValueError("format: does not go with tools, unless tool_choice is 'none'")
    prompt = model.encode_chat(
        messages,
        tools=[tool.spec() for tool in known] or None,
        thinking=None if thinking is None else bool(thinking),
        **(template or {}),
    )
    parser = ReplyParser(
        thinking=model.decode(prompt[-4:]).rstrip().endswith(THINK), tools=callable_, stop=stop
    )
    constraint = None if format is None else compile_format(format, model.tokenizer)
    generation = model._generation(
        prompt, session, sampling, max_tokens=max_tokens, stop=(), **options
    )
    return Reply(
        generation,
        parser,
        budget=budget,
        constraint=constraint,
        one_call=not parallel_tool_calls,
    )


def _budget(thinking: bool | int | None) -> int | None:
    if thinking is None or isinstance(thinking, bool):
        return None
    if not isinstance(thinking, int) or thinking < 0:
        raise ValueError(f"thinking: {thinking!r}, expected a bool or a number of tokens")
    return thinking


def _without_calls(model: Model, sampling: Sampling) -> Sampling:
    """The tools stay in the prompt, so that it is reused, but no call can be drawn."""
    call = model.tokenizer.added_tokens.get(CALL)
    bias = sampling.logit_bias
    return sampling if call is None else sampling.merged({"logit_bias": {**bias, call: BAN}})
