"""Pages about the source say what the present source says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_reference_pages_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quoted_source_is_in_the_repository() -> None:
    """Each C++ block of adding-an-op.md is a piece of some file, spaces aside."""
    page = (ROOT / "docs" / "adding-an-op.md").read_text()
    paths = [p for folder in ("metal", "src") for p in (ROOT / folder).rglob("*.*")]
    sources = [plain(path.read_text()) for path in paths]
    for block in re.findall(r"```cpp\n(.*?)```", page, re.S):
        for piece in block.split("\n\n"):
            assert any(plain(piece) in source for source in sources), piece


def plain(code: str) -> str:
    return "".join(code.split())
