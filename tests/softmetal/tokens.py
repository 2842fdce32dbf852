"""Preprocessed source as a list of tokens that keeps every character and knows its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"'  # string
    r"|'(?:\\.|[^'\\])*'"  # character
    r"|[A-Za-z_]\w*"
    r"|\.?\d(?:[eEpP][+-]|[\w.])*"  # number, with suffixes
    r"|\n\#[^\n]*"  # line marker
    r"|(?:[^\S\n]|\n(?!\#))+"
    r"|::|->|<<=|>>=|<<|\.\.\.|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|."
)
_MARKER = re.compile(r'\n#\s*(\d+)\s+"([^"]*)"')
_CLOSER = {"(": ")", "[": "]", "{": "}"}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")


class SourceError(Exception):
    """What is wrong with a kernel source, as text with the source's file and line."""


@dataclass
class Attribute:
    """A `[[…]]` that was taken out of the text."""

    at: int  # index of its first token
    name: str
    argument: str  # text between its parentheses


@dataclass
class Tokens:
    text: list[str]
    attributes: list[Attribute] = field(default_factory=list)
    _places: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def of(cls, source: str) -> Tokens:
        return cls(_TOKEN.findall("\n" + source))

    def __getitem__(self, i: int) -> str:
        return self.text[i] if 0 <= i < len(self.text) else ""

    def __len__(self) -> int:
        return len(self.text)

    def blank(self, i: int) -> bool:
        token = self.text[i]
        return not token or token.isspace() or token.startswith("\n#")

    def after(self, i: int) -> int:
        """Index of the next token that says something; len(self) at the end."""
        i += 1
        while i < len(self.text) and self.blank(i):
            i += 1
        return i

    def before(self, i: int) -> int:
        i -= 1
        while i >= 0 and self.blank(i):
            i -= 1
        return i

    def close(self, i: int) -> int:
        """Index of the bracket that closes the one at `i`."""
        opener, closer, depth = self.text[i], _CLOSER[self.text[i]], 0
        for j in range(i, len(self.text)):
            if self.text[j] == opener:
                depth += 1
            elif self.text[j] == closer:
                depth -= 1
                if depth == 0:
                    return j
        raise self.error(i, f"'{opener}' is not closed")

    def close_angle(self, i: int) -> int:
        """Index of the `>` of a template argument list that starts at `i`, or -1."""
        depth = 0
        while i < len(self.text):
            token = self.text[i]
            if token == "<":
                depth += 1
            elif token == ">":
                depth -= 1
                if depth == 0:
                    return i
            elif token in "([" and token:
                i = self.close(i)
            elif token in {";", "{", "}"}:
                return -1
            i += 1
        return -1

    def said(self, begin: int, end: int) -> list[int]:
        """Indices in [begin, end) of tokens that say something."""
        return [i for i in range(begin, end) if not self.blank(i)]

    def plain(self, begin: int, end: int) -> str:
        """The text of a range on one line."""
        return " ".join(self.text[i] for i in self.said(begin, end))

    def erase(self, begin: int, end: int) -> None:
        """Take out a range, but no line."""
        for i in range(begin, end):
            if not self.text[i].startswith("\n#"):
                self.text[i] = "\n" * self.text[i].count("\n") or " "

    def place(self, i: int) -> tuple[str, int]:
        """File and line of token `i`."""
        if not self._places:
            file, line = "source", 0
            for token in self.text:
                if marker := _MARKER.match(token):
                    file, line = marker[2], int(marker[1]) - 1
                else:
                    line += token.count("\n")
                self._places.append((file, line))
        return self._places[i]

    def error(self, i: int, message: str) -> SourceError:
        file, line = self.place(i)
        return SourceError(f"{file}:{line}: error: {message}")

    def take_attributes(self) -> None:
        """Move every `[[…]]` from the text to `attributes`."""
        i = 0
        while i < len(self.text):
            if self.text[i] == "[" and self[i + 1] == "[":
                end = self.close(i)
                self._split_attributes(i, i + 2, end - 1)
                self.erase(i, end + 1)
                i = end
            i += 1

    def _split_attributes(self, at: int, begin: int, end: int) -> None:
        i = begin
        while i < end:
            if self.blank(i) or self.text[i] == ",":
                i += 1
                continue
            name, argument, following = self.text[i], "", self.after(i)
            if self[following] == "(":
                stop = self.close(following)
                argument = self.plain(following + 1, stop)
                following = stop + 1
            self.attributes.append(Attribute(at, name, argument))
            i = following

    def attributes_in(self, begin: int, end: int) -> dict[str, str]:
        return {a.name: a.argument for a in self.attributes if begin <= a.at < end}
