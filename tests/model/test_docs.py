"""The Python examples of the README and the guide run.

The ```python blocks of a page are one program. Its line `MODEL = …` is replaced by one that names
the tiny checkpoint. A block that cannot run here begins with ```python no-run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
MODEL = re.compile(r"^MODEL = .*$", re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, checkpoint: Callable[..., Path]) -> None:
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    assert len(MODEL.findall("".join(b[1] for b in blocks))) == 1, "one line MODEL = … a page"
    for block in blocks:
        code = MODEL.sub(lambda _: f"MODEL = {str(checkpoint('tiny'))!r}", block[1])
        # Empty lines above, so that a traceback names the page's line.
        above = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(above + code, str(page), "exec"), names)
