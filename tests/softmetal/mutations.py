"""Sources with one barrier less: each has to be reported, or the barrier was not needed."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)\s*;")


def without_each_barrier(source: str) -> Iterator[tuple[int, str]]:
    """For each barrier of the text: its line, and the text with an empty statement for it."""
    for found in _BARRIER.finditer(source):
        line = 1 + source.count("\n", 0, found.start())
        yield line, source[: found.start()] + ";" + source[found.end() :]
