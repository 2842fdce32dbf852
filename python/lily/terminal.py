"""The standard streams of the command line: text as it comes, progress, one-line messages."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from typing import IO


def printable(text: str) -> str:
    """One line that cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def prepare_streams() -> None:
    """Output in any encoding never fails on a character; a closed stream swallows what it gets."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")


def drop_output() -> None:
    """Let what standard output still buffers go nowhere, since its reader has gone."""
    with contextlib.suppress(Exception):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Output:
    """Writes a model's text as it comes; thinking is dim on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._colour = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
        self._dim = False
        self._last = ""

    def write(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._terminal:
            text = text.translate(CONTROLS)
        if dim != self._dim and self._colour:
            text = ("\033[2m" if dim else "\033[0m") + text
            self._dim = dim
        self.raw(text)

    def raw(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self, *, stopped: bool = False) -> None:
        """End the line; `stopped` says that Ctrl-C was pressed."""
        if self._dim:
            sys.stdout.write("\033[0m")
            self._dim = False
        sys.stdout.write("\n")
        sys.stdout.flush()


def open_output(*, markdown: bool) -> Output:
    """Where text goes; Markdown is set if that is a terminal and rich is installed."""
    if markdown and is_terminal(sys.stdout):
        with contextlib.suppress(ImportError):
            from lily.markdown_output import MarkdownOutput

            return MarkdownOutput()
    return Output()


# A model may draw any character; on a terminal, controls are shown instead of obeyed.
CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Bar:
    """A progress bar on standard error, if that is a terminal and the work takes a while."""

    DELAY_S = 0.4
    PERIOD_S = 0.1
    WIDTH = 24

    def __init__(self) -> None:
        self.enabled = is_terminal(sys.stderr)
        self._lock = threading.Lock()  # downloads report from several threads
        self._what = ""
        self._started = self._drawn = 0.0
        self._shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.enabled:
            return
        with self._lock:
            now = time.monotonic()
            if what != self._what:
                self._erase()
                self._what, self._started, self._drawn = what, now, 0.0
            if now - self._started < self.DELAY_S or now - self._drawn < self.PERIOD_S:
                return
            self._drawn = now
            self._draw(self._line(done, total, now - self._started))

    def prompt(self, done: int, total: int) -> None:
        self("prompt", done, total)

    def status(self, text: str) -> None:
        """A line that stays until the next one."""
        if self.enabled:
            with self._lock:
                self._draw(text)

    def clear(self) -> None:
        with self._lock:
            self._erase()
            self._what = ""

    def _line(self, done: int, total: int, seconds: float) -> str:
        share = min(1.0, done / total) if total else 0.0
        full = round(share * self.WIDTH)
        bar = "#" * full + "." * (self.WIDTH - full)
        if self._what in ("prompt", "score"):
            amount = f"{done:,} of {total:,} tokens"
        else:
            amount = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
            if seconds > 0:
                amount += f", {done / seconds / 1e9:.2f} GB/s"
        return f"{self._what:<8} [{bar}] {share:4.0%}  {amount}"

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\033[K{printable(text)[:width]}")
        sys.stderr.flush()
        self._shown = True

    def _erase(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._shown = False


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
