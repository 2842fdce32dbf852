#!/usr/bin/env python3
"""The long run, for a night and an idle Linux machine:

    python3 tests/long.py

tests/run.py with the demo model on the software Metal after every prompt length, 10,000 rounds of
cancelling, 200 random conversations, 100 processes killed while saving and 100,000 damaged
checkpoints; then the sanitizers, the macOS wheel, the C++ tests as arm64 code under qemu, and half
an hour of clients at the server. Says at the end what failed. Needs what CONTRIBUTING.md names for
each.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from run import PYTHON, run  # noqa: E402

MORE = {
    "LILY_LONG": "1",
    "LILY_ROUNDS": "10000",
    "LILY_TALKS": "200",
    "LILY_KILLS": "100",
    "LILY_FUZZ_CASES": "100000",
}


def main() -> int:
    os.environ.update(MORE)
    failed = [] if run(sys.executable, "tests/run.py") == 0 else ["tests/run.py"]
    tools = [str(PYTHON), "-m", "pip", "install", "--quiet", "cmake", "ninja"]
    subprocess.run(tools, check=True)
    os.environ["PATH"] = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    scripts = (
        "sanitize.py",
        "cross/metal_selectors.py",
        "cross/macos.py",
        "cross/aarch64.py",
        "soak.py",
    )
    failed += [script for script in scripts if run(PYTHON, f"tests/{script}")]
    print("failed:", ", ".join(failed) or "nothing")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
