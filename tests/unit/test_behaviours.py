"""docs/behaviours.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+\.\d+) \| (.+?) \| (.*?) ?\| (.+) \|$")
TEST = re.compile(r"`([\w/]+\.(?:py|cpp))::(\w+)`")


def rows() -> list[tuple[str, str, str, str]]:
    lines = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8").splitlines()
    found = [ROW.match(line) for line in lines if re.match(r"\| \d", line)]
    assert all(found)
    return [(m[1], m[2], m[3], m[4]) for m in found if m]


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for number, _, tests, _ in rows():
        assert TEST.sub("", tests).strip() == "", number
        for path, name in TEST.findall(tests):
            file = ROOT / "tests" / path
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            head = rf"^TEST\({name}\)" if path.endswith(".cpp") else rf"^(?:async )?def {name}\("
            if not re.search(head, text, re.M):
                missing.append(f"{number} {path}::{name}")
    assert not missing


def test_what_holds_has_a_test_and_numbers_run_on() -> None:
    expected = (1, 1)
    for number, _, tests, status in rows():
        section, item = map(int, number.split("."))
        assert (section, item) in (expected, (expected[0] + 1, 1)), number
        expected = (section, item + 1)
        assert bool(tests) == ("not used" not in status), number
        assert re.match("holds|needs|open|not used|[^:]* holds?", status), (number, status)
