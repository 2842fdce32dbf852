"""Whatever computes or waits does so without Python's interpreter lock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = (Path(__file__).parents[2] / "src" / "bindings" / "core.cpp").read_text("utf-8")
RELEASE = "nb::gil_scoped_release"
SLOW = [
    "load", "build", "visit", "trimmed", "reserve", "prefill", "score", "observe", "decode", "next",
    "advance", "force", "stop", "reset", "snapshot", "restore", "discard_pending",
]  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_slow_calls_release_it(name: str) -> None:
    whole = re.split(r"\n\s*(?=(?:m)?\.def(?:_\w+)?\()", SOURCE)
    found = [part for part in whole if re.match(rf'm?\.def(?:_static)?\(\s*"{name}"', part)]
    assert found, name
    for part in found:
        assert RELEASE in part, part
