"""The text of a reply, while it comes: reasoning, content and tool calls told apart.

The family's replies look like this; the opening tag is usually the prompt's last token:

    <think>
    reasoning
    </think>

    content

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lily.stops import StopStrings
from lily.tool_arguments import ANY, Argument, argument_types, to_json
from lily.tools import Tool

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

Found = TypeVar("Found")
Waiting: TypeAlias = Generator[None, None, Found]
"""A part of the parser: yields when it needs more text."""


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """What a reply added to one of its tool calls.

    Attributes:
        index: which call of the reply, from 0.
        id: the call's id.
        name: the function's name.
        arguments: more of the arguments' JSON; the pieces of a call join to `arguments_json`.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        id: tells it from others, also of other replies.
        name: the function's name; the model may have made it up.
        arguments: values by parameter, of the schema's types where the text allowed it.
        arguments_json: the same as JSON.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Part:
    """What a reply added: to the reasoning, to the content, or to a tool call."""

    reasoning: str = ""
    content: str = ""
    call: ToolCallPiece | None = None


class ReplyParser:
    """Takes a reply's text in pieces and gives its parts, each as soon as it is certain.

    How the text is cut into pieces changes neither the joined parts nor the calls. Nothing is
    taken back, and time is linear in the text.

    - Reasoning ends at `</think>`. A reply that itself begins with `<think>` reasons first.
    - Newlines before reasoning and content, whitespace before `</think>` and before a call belong
      to the tags and are dropped.
    - A call is `<tool_call>` with `<function=NAME>` right behind it, whatever the name; with other
      text there the tag is content. Without `tools` there are no calls.
    - A value ends at a line `</parameter>` that another parameter, `</function>` or `</tool_call>`
      follows, so a string may hold the tag; a value that began on the line of its opening tag may
      end within a line as well. Of parameters with the same name the first counts. Text between
      parameters is dropped.
    - Types are those of `parse_value`; what `tools` do not know may have any type.
    - A call is complete with `</function>`, or with `</tool_call>` where that was left out. A call
      that is cut before is not in `calls`, though pieces of it may have come; one that is cut
      before its name is complete leaves no trace.
    - Calls in the reasoning are reasoning, with one exception: if the text ends there, and its end
      is nothing but complete calls of functions in `tools`, they count, since the model then left
      out `</think>`. They come with `finish`, unless the text was cut there.
    - Stop strings count in content only. After one the reply is over.

    Args:
        thinking: the prompt ends inside a thought, so the reply begins there.
        tools: what may be called.
        stop: strings that end the reply.

    Raises:
        ValueError: a stop is empty, or not a string.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Tool] = (),
        stop: StopStrings | str | Sequence[str] = (),
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._reasoning = _Text(StopStrings(), holds=True)
        self._content = _Text(self._stops, holds=bool(tools))
        self._thinks = thinking
        self._begun: list[_Call] = []
        self._calls: list[ToolCall] = []
        self._out: list[tuple[str | _Call, list[str]]] = []
        self._buffer, self._at = "", 0  # unread text begins at _at
        self._ended = self._cut = False
        self._reader = self._read()

    @property
    def in_thinking(self) -> bool:
        """Whether more text would be reasoning."""
        return self._thinks

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._reasoning.text

    @property
    def content(self) -> str:
        """The content so far."""
        return self._content.text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete calls so far, in order."""
        return tuple(self._calls)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.matched

    def push(self, text: str) -> list[Part]:
        """Take the next piece of text and give what became certain.

        After a stop string, or after `finish`, text is ignored.
        """
        if self._ended or self._stops.matched is not None:
            return []
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        next(self._reader, None)
        return self._parts()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """End the text and give what was held back; half a tag is text.

        Args:
            cut: the model had not ended: a call in the reasoning is then a draft.
        """
        if not self._ended:
            self._ended, self._cut = True, cut
            next(self._reader, None)
            self._add("reasoning", self._reasoning.end())
            self._add("content", self._content.end(blank=not self._begun))
        return self._parts()

    # The grammar. Each method reads on from where the one before stopped.

    def _read(self) -> Waiting[None]:
        blank, tag = yield from self._blank_then(THINK)
        if tag:
            self._thinks = True
        else:
            self._say(blank)
        if self._thinks:
            yield from self._read_thinking()
        if not self._thinks:
            yield from self._read_content()

    def _read_thinking(self) -> Waiting[None]:
        tags = _THINKING if self._tools else _THINKING_ALONE
        while self._thinks:
            text, tag = yield from self._next(tags)
            if text:
                self._say(text)
            elif tag == CALL:
                yield from self._read_draft()
            elif tag == THINK_END:
                self._end_thinking()
            else:
                break

    def _end_thinking(self) -> None:
        self._add("reasoning", self._reasoning.end(blank=False))
        self._thinks = False

    def _read_draft(self) -> Waiting[None]:
        """A call in the reasoning, and those right behind it: held until what follows is known."""
        held, tag = [CALL], CALL
        while tag == CALL:
            said, name = yield from self._read_opening()
            held.append(said)
            if name not in self._tools:
                break
            text, tag = yield from self._next(_DRAFT)
            while text:
                held.append(text)
                text, tag = yield from self._next(_DRAFT)
            if tag == CALL_END:
                blank, tag = yield from self._blank_then(CALL)
                held += [CALL_END, blank, tag]
                whole = not tag and self._is_cut("") and not self._cut
                if whole and self._forgot_to_close("".join(held)):
                    self._end_thinking()
                    self._buffer, self._at = "".join(held), 0
                    return
            else:
                self._at -= len(tag)
        self._say("".join(held))

    def _forgot_to_close(self, text: str) -> bool:
        """Whether the reasoning's end is nothing but complete calls of known functions."""
        reply = ReplyParser(thinking=False, tools=list(self._tools.values()))
        reply.push(text)
        reply.finish()
        complete = len(reply.calls) == len(reply._begun) and not reply.content
        return complete and all(call.name in self._tools for call in reply.calls)

    def _read_content(self) -> Waiting[None]:
        tags = _CONTENT if self._tools else _NOTHING
        while self._stops.matched is None:
            text, tag = yield from self._next(tags)
            if text:
                self._say(text)
            elif tag:
                yield from self._read_block()
            else:
                break

    def _read_block(self) -> Waiting[None]:
        """What follows `<tool_call>` in the content."""
        said, name = yield from self._read_opening()
        if name:
            tag = yield from self._read_call(name)
            if tag == FUNCTION_END:
                _, tag = yield from self._blank_then(CALL_END)
                if not tag:
                    self._drop_cut(CALL_END)
        elif not self._drop_cut(FUNCTION):
            self._say(CALL + said)

    def _drop_cut(self, tag: str) -> bool:
        """Leave out the beginning of `tag` that the text ends in, if it does."""
        cut = self._is_cut(tag)
        self._at = len(self._buffer) if cut else self._at
        return cut

    def _read_opening(self) -> Waiting[tuple[str, str]]:
        """What stands between `<tool_call>` and the call's body, and the function's name if any."""
        blank, tag = yield from self._blank_then(FUNCTION)
        if not tag:
            return blank, ""
        name, end = yield from self._read_name(_FUNCTION_NAME)
        return blank + FUNCTION + name + end, name if end else ""

    def _read_name(self, tags: _Tags) -> Waiting[tuple[str, str]]:
        """A name and the `>` behind it, or what else is there instead of them."""
        said = []
        text, end = yield from self._next(tags)
        while text:
            said.append(text)
            text, end = yield from self._next(tags)
        if end != ">":
            self._at -= len(end)
            end = ""
        return "".join(said), end

    def _read_call(self, name: str) -> Waiting[str]:
        """A call from behind its name on; returns the tag that ends it, "" if it is cut."""
        tool = self._tools.get(name)
        self._add("content", self._content.end(blank=False))
        call = _Call(len(self._begun), name, tool.parameters if tool else None)
        self._begun.append(call)
        self._out.append((call, [""]))  # the name is certain, arguments may take long
        while True:
            text, tag = yield from self._next(_BODY)
            if not text and not tag:
                return ""
            while tag == PARAMETER:
                tag = yield from self._read_parameter(call)
            if tag in (FUNCTION_END, CALL_END):
                self._add(call, call.finish())
                self._calls.append(call.done())
                return tag

    def _read_parameter(self, call: _Call) -> Waiting[str]:
        """A parameter from its name on; returns the tag behind it, "" if it is none or cut."""
        key, end = yield from self._read_name(_PARAMETER_NAME)
        _, first = yield from self._next(_CHARACTER)
        self._at -= len(first)
        if not end or not first:
            return ""
        inline = first != "\n"
        self._add(call, call.begin(key, inline))
        tag = ""
        while True:
            if not tag:
                text, tag = yield from self._next(_INLINE_VALUE if inline else _VALUE)
                if self._is_cut(""):
                    return ""
                if text:
                    self._add(call, call.value(text))
                    continue
            blank, behind = yield from self._blank_then(*_BEHIND_VALUE, PARAMETER_END)
            if behind in _BEHIND_VALUE:
                self._add(call, call.end_value())
                return behind
            if self._is_cut(*_BEHIND_VALUE):
                return ""
            # The tag was text of the value; what is behind it may be another.
            line = blank.endswith("\n")
            if behind and (line or inline):
                self._add(call, call.value(tag + blank[: len(blank) - line]))
                tag = "\n" * line + PARAMETER_END
            else:
                self._add(call, call.value(tag + blank + behind))
                tag = ""

    # What goes in

    def _next(self, tags: _Tags) -> Waiting[tuple[str, str]]:
        """Text up to the next of `tags` as far as it is there, or the tag; neither at the end."""
        while True:
            end, tag = tags.find(self._buffer, self._at, self._ended)
            if end > self._at:
                text, self._at = self._buffer[self._at : end], end
                return text, ""
            if tag or self._ended:
                self._at += len(tag)
                return "", tag
            yield

    def _blank_then(self, *tags: str) -> Waiting[tuple[str, str]]:
        """Whitespace, and the one of `tags` right behind it, if one is."""
        blank = []
        while True:
            start, (self._at, _) = self._at, _SOLID.find(self._buffer, self._at, True)
            blank.append(self._buffer[start : self._at])
            rest = self._buffer[self._at : self._at + _LONGEST]
            for tag in tags:
                if rest.startswith(tag):
                    self._at += len(tag)
                    return "".join(blank), tag
            if self._ended or not any(tag.startswith(rest) for tag in tags):
                return "".join(blank), ""
            yield

    def _is_cut(self, *tags: str) -> bool:
        """Whether the text ends here or, here, within one of `tags`."""
        return self._ended and any(tag.startswith(self._buffer[self._at :]) for tag in tags)

    # What comes out

    def _say(self, text: str) -> None:
        if self._thinks:
            self._add("reasoning", self._reasoning.push(text))
        else:
            self._add("content", self._content.push(text))

    def _add(self, to: str | _Call, text: str) -> None:
        if text and self._out and self._out[-1][0] == to:
            self._out[-1][1].append(text)
        elif text:
            self._out.append((to, [text]))

    def _parts(self) -> list[Part]:
        out, self._out = self._out, []
        parts = []
        for to, texts in out:
            text = "".join(texts)
            if isinstance(to, _Call):
                parts.append(Part(call=ToolCallPiece(to.index, to.id, to.name, text)))
            else:
                parts.append(Part(content=text) if to == "content" else Part(reasoning=text))
        return parts


class _Tags:
    """Finds the first of some tags in a text that is still coming.

    Args:
        tags: the tags; without any there is nothing to find.
        pattern: what to find instead of the tags.
    """

    def __init__(self, *tags: str, pattern: str = "") -> None:
        either = "|".join(map(re.escape, tags))
        self._pattern = re.compile(pattern or either or "(?!)", re.DOTALL)
        self._beginnings = {tag[:n] for tag in tags for n in range(1, len(tag))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int, ended: bool) -> tuple[int, str]:
        """Where the text before the first tag from `start` on ends, and the tag.

        Without a tag, text ends where one may begin that is not all there yet, unless the text has
        `ended`.
        """
        if match := self._pattern.search(text, start):
            return match.start(), match[0]
        if not ended:
            for at in range(max(start, len(text) - self._longest), len(text)):
                if text[at:] in self._beginnings:
                    return at, ""
        return len(text), ""


_NOTHING = _Tags()
_CHARACTER = _Tags(pattern=".")
_SOLID = _Tags(pattern=r"\S")
_THINKING = _Tags(THINK_END, CALL)
_THINKING_ALONE = _Tags(THINK_END)
_DRAFT = _Tags(CALL_END, THINK_END)
_CONTENT = _Tags(CALL)
_FUNCTION_NAME = _Tags(">", "\n", "<")
_PARAMETER_NAME = _Tags(">", "\n")
_BODY = _Tags(PARAMETER, FUNCTION_END, CALL_END)
_VALUE = _Tags("\n" + PARAMETER_END)
_INLINE_VALUE = _Tags("\n" + PARAMETER_END, PARAMETER_END)
_BEHIND_VALUE = (PARAMETER, FUNCTION_END, CALL_END)
_LONGEST = 16
"""No tag is longer."""


class _Text:
    """Reasoning or content.

    Args:
        stops: end it.
        holds: keep whitespace back until it is known that it is not the end.
    """

    def __init__(self, stops: StopStrings, holds: bool) -> None:
        self._stops = stops
        self._holds = holds
        self._begun = False
        self._said: list[str] = []
        self._blank: list[str] = []

    @property
    def text(self) -> str:
        self._said = ["".join(self._said)]
        return self._said[0]

    def push(self, text: str) -> str:
        """What may be shown by now."""
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        shown = self._show(self._stops.push(text))
        return shown if self._stops.matched is None else shown + self.end()

    def end(self, blank: bool = True) -> str:
        """What was kept back, with or without the whitespace at the end; more text may follow."""
        shown = self._show(self._stops.finish())
        left, self._blank = "".join(self._blank) if blank else "", []
        self._said.append(left)
        return shown + left

    def _show(self, text: str) -> str:
        shown = text.rstrip() if self._holds else text
        if shown:
            left, self._blank = "".join(self._blank), []
            self._said += (left, shown)
            self._blank.append(text[len(shown) :])
            return left + shown
        self._blank.append(text)
        return ""


class _Call:
    """A tool call while it comes; its methods give the JSON that became certain."""

    def __init__(self, index: int, name: str, schema: Mapping[str, Any] | None) -> None:
        self.index = index
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self._schema = schema
        self._arguments: dict[str, Any] = {}
        self._json: list[str] = []
        self._key = ""
        self._argument = Argument(ANY)
        self._repeats = False
        self._fresh = False  # whether the next character is the newline behind the opening tag

    def begin(self, key: str, inline: bool) -> str:
        self._key, self._fresh = key, not inline
        self._repeats = key in self._arguments
        self._argument = Argument(argument_types(self._schema, key) if self._schema else ANY)
        return self._write((", " if self._arguments else "{") + to_json(key) + ": ")

    def value(self, text: str) -> str:
        text, self._fresh = text[self._fresh :], False
        return self._write(self._argument.push(text))

    def end_value(self) -> str:
        value, text = self._argument.finish()
        self._arguments.setdefault(self._key, value)
        return self._write(text)

    def finish(self) -> str:
        self._repeats = False
        return self._write("}" if self._arguments else "{}")

    def done(self) -> ToolCall:
        return ToolCall(self.id, self.name, self._arguments, "".join(self._json))

    def _write(self, text: str) -> str:
        if self._repeats:
            return ""
        self._json.append(text)
        return text
