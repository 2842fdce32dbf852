#!/usr/bin/env python3
"""Set up and run all tests, in one command:

    python3 tests/run.py [pytest arguments]

Makes a virtual environment in .venv-test, builds lily with its test-only parts into it, then runs
the linter, the formatter's check, the type checker and pytest, in two processes. LILY_TEST_VENV
names another place.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("LILY_TEST_VENV", ROOT / ".venv-test"))
PYTHON = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"


def run(*command: str | Path) -> int:
    print("$", *command, flush=True)
    return subprocess.run([str(part) for part in command], cwd=ROOT).returncode


def main() -> int:
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    build = ["-C", "cmake.define.LILY_TESTING=ON", "-C", "cmake.define.LILY_STRICT=ON"]
    if run(PYTHON, "-m", "pip", "install", "--quiet", *build, ".[test]"):
        return 1
    checks = [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
    ]
    failed = [c for c in checks if run(PYTHON, "-m", *c)]
    pytest = ("pytest", "-n", "2", "--dist", "worksteal", *sys.argv[1:])
    failed += [("pytest",)] if run(PYTHON, "-m", *pytest) else []
    for check in failed:
        print("failed:", *check)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
