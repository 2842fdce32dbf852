"""The Python examples of the README and the guide run, as they stand, in the repository's root.

The ```python blocks of a page are one program. A block that cannot run here begins with
```python no-run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        # Empty lines above, so that a traceback names the page's line.
        above = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(above + block[1], str(page), "exec"), names)
