"""Set Markdown on a terminal: what stands on the screen, and what has scrolled away."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rich")

from lily.markdown_output import Blocks, MarkdownOutput, render


class Screen(io.StringIO):
    """A terminal of some size that knows the few controls which lily and rich write."""

    encoding = "utf-8"
    TOKEN = re.compile(r"\033\[(\d*)([A-Za-z])|\033\[[\d;]*m|.", re.S)

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.size = os.terminal_size((columns, lines))
        self.rows = [""]
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for found in self.TOKEN.finditer(text):
            match "ESC " + found[2] if found[2] else found[0]:
                case "\n":
                    self._down()
                case "\r":
                    self.column = 0
                case "ESC A":
                    top = max(0, len(self.rows) - self.size.lines)
                    self.row = max(top, self.row - int(found[1] or 1))
                case "ESC J":
                    self.rows[self.row] = self.rows[self.row][: self.column]
                    del self.rows[self.row + 1 :]
                case char if len(char) == 1:
                    if self.column == self.size.columns:
                        self._down()
                    line = self.rows[self.row].ljust(self.column)
                    self.rows[self.row] = line[: self.column] + char + line[self.column + 1 :]
                    self.column += 1
        return len(text)

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")

    def shown(self) -> list[str]:
        return [row.rstrip() for row in self.rows]


def on_screen(monkeypatch: pytest.MonkeyPatch, columns: int = 40, lines: int = 12) -> Screen:
    """Standard output is a terminal; called in a test, since pytest puts its own in place."""
    screen = Screen(columns, lines)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: screen.size)
    return screen


def cut(text: str, pieces: Sequence[str] | None = None) -> list[str]:
    """The blocks of a text that comes in pieces."""
    blocks, found = Blocks(), [""]
    for piece in text if pieces is None else pieces:
        for part in blocks.push(piece):
            if part is None:
                found.append("")
            else:
                found[-1] += part
    return [block.rstrip("\n") for block in found if block]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\ntwo\n\nthree", ["one\ntwo", "three"]),
        ("\n\n  one\n \n\t\ntwo\n\n", ["  one", "two"]),
        ("see:\n```py\na\n\nb\n```\nrest", ["see:\n```py\na\n\nb\n```", "rest"]),
        ("~~~\n```\n\n~~~\n\nx", ["~~~\n```\n\n~~~", "x"]),
        ("- a\n\n  more of a\n- b\n\nend", ["- a\n\n  more of a\n- b", "end"]),
        ("1. a:\n\n   ```\n   x\n\n   ```\n\nend", ["1. a:\n\n   ```\n   x\n\n   ```", "end"]),
        ("text\n\n    code", ["text", "    code"]),
        ("```\nnever closed\n\nx", ["```\nnever closed\n\nx"]),
    ],
)
def test_blocks_end_at_empty_lines_and_fences(text: str, blocks: list[str]) -> None:
    assert cut(text) == blocks
    assert cut(text, [text]) == blocks


MARKDOWN = st.lists(
    st.sampled_from(
        ["word ", "a longer word ", "\n", "\n\n", "- item\n", "```\n", "# Head\n", "**b** ", "  "]
    ),
    max_size=40,
).map("".join)


@given(MARKDOWN, st.data())
def test_blocks_do_not_depend_on_the_pieces(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert cut(text, pieces) == cut(text)


@given(MARKDOWN, st.integers(12, 60), st.integers(2, 20))
def test_the_screen_ends_as_if_each_block_had_been_set_at_once(
    text: str, columns: int, lines: int
) -> None:
    """Whatever scrolls: nothing above a block is touched, nothing of its plain text is left."""
    with pytest.MonkeyPatch.context() as patch:
        screen = on_screen(patch, columns, lines)
        screen.write("before\n")
        high = []
        settle = MarkdownOutput._settle

        def note_height(self: MarkdownOutput) -> None:
            if self._source and not self._fits():
                high.append(self._source)
            settle(self)

        patch.setattr(MarkdownOutput, "_settle", note_height)
        output = MarkdownOutput()
        for char in text:
            output.write(char)
        output.end()
        shown = screen.shown()
        assert shown[0] == "before"
        if not high:
            want = "\n".join(render(block, columns) for block in cut(text)) or "\n"
            want = re.sub(r"\033\[[\d;]*m", "", want)
            assert shown[1:] == [row.rstrip() for row in want.split("\n")]


def test_a_block_stands_plain_while_it_comes_and_set_when_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    output.write("hm\n\n", dim=True)
    output.write("A **bold** word\nand `code`")
    assert screen.shown() == ["hm", "", "A **bold** word", "and `code`"]
    output.write("\n\nN")
    assert screen.shown() == ["hm", "", "A bold word", "and code", "", "N"]
    output.end()
    assert screen.shown()[-2:] == ["N", ""]


def test_a_block_higher_than_the_screen_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    lines = [f"**{i}** x" for i in range(20)]
    output.write("\n".join(lines) + "\n\n*end*")
    output.end()
    assert screen.shown() == [*lines, "", "end", ""]


def test_a_screen_that_changes_its_size_leaves_the_block_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    output.write("**a** " * 10)
    screen.size = os.terminal_size((30, 12))
    output.end()
    assert "".join(screen.shown()).count("**a**") == 10


def test_ctrl_c_leaves_the_block_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    output.write("**a**")
    screen.write("^C")
    output.end(stopped=True)
    assert screen.shown() == ["**a**^C", ""]


def test_nothing_of_the_text_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    output.write("\\[ x_1 \\]\n\n$$*y*$$")
    output.end()
    assert screen.shown() == ["\\[ x_1 \\]", "", "$$*y*$$", ""], "mathematics stays plain"
    shown = re.sub(r"\033\[[\d;]*m", "", render("a <div> b\nnext [t](http://u) <br>", 60))
    assert shown.splitlines() == ["a <div> b", "next t (http://u) <br>"]


def test_controls_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    output = MarkdownOutput()
    output.write("a\x1b[2Jb\n\n```\n\x9b1A\n```\n")
    output.end()
    assert screen.shown()[0] == "a␛[2Jb"
