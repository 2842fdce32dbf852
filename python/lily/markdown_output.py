"""An answer's Markdown on a terminal, by means of rich.

Text appears as it comes. Once a block (a paragraph, a list, a fence of code) is complete, its plain
text gives place to its set form. Only rows that are still on the screen are written over, so what
has scrolled away stays as it was: a block higher than the screen stays plain, as does one during
which the screen changed its size. Rows are counted by breaking lines here, one cell early; a
character that the terminal draws wider than it should leaves a row too many, never one too few.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator

from markdown_it import MarkdownIt
from rich.cells import get_character_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown

from lily.terminal import CONTROLS, Output

_PART = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LIST = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])\s")
_MATHS = re.compile(r"\$\$|\\[(\[]")


class Blocks:
    """Cuts Markdown into blocks while it comes."""

    def __init__(self) -> None:
        self._line = ""  # the present line, without spaces that may yet be an empty line's
        self._held = ""  # white space since the last line that is not empty
        self._fence = ""
        self._inside = self._is_list = False

    def push(self, text: str) -> Iterator[str | None]:
        """Text of the present block, None where it ends; empty lines between blocks are dropped."""
        for part in _PART.findall(text):
            if not self._line and not self._fence:
                self._held += part
                if self._held.isspace():
                    continue
                part, self._held = self._held, ""
                _, gap, indent = part[: len(part) - len(part.lstrip())].rpartition("\n")
                if self._inside and gap and not (indent and self._is_list):
                    self._inside = False
                    yield None
                if not self._inside:
                    part = indent + part.lstrip()
            self._line += part
            yield part
            if part.endswith("\n"):
                line, self._line = self._line.lstrip("\n"), ""
                self._is_list |= not self._inside and _LIST.match(line) is not None
                self._inside = True
                if self._closes(line):
                    self._inside = self._is_list = False
                    yield None

    def _closes(self, line: str) -> bool:
        """Whether a whole line ends a fence, and the block with it."""
        found = _FENCE.match(line)
        if not self._fence:
            self._fence = found[1] if found else ""
        elif found and found[1].startswith(self._fence) and not line.strip(" \t\n`~"):
            self._fence = ""
            return not self._is_list
        return False


class MarkdownOutput(Output):
    """Writes thinking dim and as it is, the answer as set Markdown."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = Blocks()
        self._source = ""
        self._rows = self._column = 0
        self._size = shutil.get_terminal_size()
        self._gap = False

    def write(self, text: str, *, dim: bool = False) -> None:
        if dim:
            super().write(text, dim=True)
            return
        for part in self._blocks.push(text):
            if part is None:
                self._settle()
            else:
                self._append(part.translate(CONTROLS))

    def end(self, *, stopped: bool = False) -> None:
        if not stopped:  # Ctrl-C itself has left its mark on the screen
            self._settle()
        if not self._gap:
            super().end()
        self._gap = False

    def _append(self, text: str) -> None:
        if not self._source:
            if self._gap:
                super().write("\n")
            self._rows = self._column = 0
            self._size = shutil.get_terminal_size()
        self._gap = False
        self._source += text
        super().write(self._broken(text))

    def _broken(self, text: str) -> str:
        """The text with its lines broken, as long as the block fits on the screen."""
        out = []
        for char in text:
            width = 8 - self._column % 8 if char == "\t" else get_character_cell_size(char)
            if char == "\n":
                self._rows, self._column = self._rows + 1, 0
            elif self._column + width >= self._size.columns:
                self._rows, self._column = self._rows + 1, width
                if self._fits():
                    out.append("\n")
            else:
                self._column += width
            out.append(char)
        return "".join(out)

    def _fits(self) -> bool:
        return self._rows < self._size.lines - 1

    def _settle(self) -> None:
        """Set the block that is complete."""
        source, self._source = self._source, ""
        if not source:
            return
        stays = not self._fits() or self._size != shutil.get_terminal_size()
        if stays or _MATHS.search(source):
            made = source.rstrip("\n") + "\n"
        else:
            made = render(source, self._size.columns)
        if made != source.rstrip("\n") + "\n":
            up = f"\033[{self._rows}A" if self._rows else ""
            self.raw(f"\r{up}\033[J{made}")
        elif self._column:
            self.raw("\n")
        self._gap = True


class _LeftHeading(Heading):
    """A heading without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements = {**Markdown.elements, "heading_open": _LeftHeading}  # noqa: RUF012


def render(source: str, width: int) -> str:
    """A block as the terminal shows it. HTML is text, and line ends stay."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    made = _Markdown(source, code_theme="ansi_dark", hyperlinks=False)
    made.parsed = parser.parse(source)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as captured:
        console.print(made)
    lines = captured.get().strip("\n").split("\n")
    return "".join(line.rstrip(" ") + "\n" for line in lines)
