"""The declarations of a source: enough structure for the translator and for its rules."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from softmetal.tokens import Tokens

_TYPE_WORDS = {"struct", "class", "union", "enum"}
# Before a parenthesis that no parameters are in.
_NO_FUNCTION = {"decltype", "__attribute__", "alignas", "operator", "static_assert"}


@dataclass
class Declaration:
    """One declaration at namespace or type scope: tokens [begin, end)."""

    begin: int
    end: int
    namespaces: tuple[str, ...]
    start: int  # first token after a template header
    is_member: bool
    parameters: tuple[int, int] | None = None  # the function's parentheses
    body: tuple[int, int] | None = None  # its braces

    def template_header(self, tokens: Tokens) -> str:
        return tokens.plain(self.begin, self.start)


def declarations(tokens: Tokens) -> Iterator[Declaration]:
    return _scope(tokens, 0, len(tokens), (), False)


def _scope(
    tokens: Tokens, i: int, end: int, names: tuple[str, ...], in_type: bool
) -> Iterator[Declaration]:
    while True:
        while i < end and (tokens.blank(i) or tokens[i] == ";"):
            i += 1
        if i >= end:
            return
        if tokens[i] in {"public", "private", "protected"}:
            i = tokens.after(tokens.after(i))
            continue
        i = yield from _one(tokens, i, end, names, in_type)


def _one(
    tokens: Tokens, begin: int, end: int, names: tuple[str, ...], in_type: bool
) -> Generator[Declaration, None, int]:
    """Yield the declaration at `begin`, or those inside it; return where it ends."""
    start = begin
    while tokens[start] == "template" and tokens[tokens.after(start)] == "<":
        start = tokens.after(tokens.close_angle(tokens.after(start)))
    found = Declaration(begin, end, names, start, in_type)
    assigned = is_type = False
    i = start
    while i < end:
        token = tokens[i]
        if token == ";":
            found.end = i + 1
            break
        if token in _TYPE_WORDS and found.parameters is None:
            is_type = True
        elif token == "=":
            assigned = True
        elif token == "[":
            i = tokens.close(i)
        elif token == "(":
            close = tokens.close(i)
            named = tokens[tokens.before(i)] not in _NO_FUNCTION
            if found.parameters is None and not assigned and named:
                found.parameters = (i, close)
            i = close
        elif token == "{":
            close = tokens.close(i)
            words = [tokens[j] for j in tokens.said(start, i)]
            if "namespace" in words or words[:1] == ["extern"]:
                name = words[-1] if "namespace" in words and words[-1] != "namespace" else ""
                yield from _scope(tokens, i + 1, close, (*names, name) if name else names, False)
                return close + 1
            if is_type and found.parameters is None:
                if "enum" not in words:
                    yield from _scope(tokens, i + 1, close, names, True)
            elif found.parameters is not None and not assigned:
                found.body, found.end = (i, close), close + 1
                break
            i = close
        i += 1
    yield found
    return found.end
