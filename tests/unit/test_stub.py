"""The committed stub of the extension is what the extension is."""

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).resolve().parents[2] / "python" / "lily" / "_core.pyi"


def test_stub_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "lily._core", "-o", fresh]
    subprocess.run(command, check=True)
    assert fresh.read_text() == STUB.read_text(), f"run {command[1:-1]} {STUB}"
