#!/usr/bin/env python3
"""From a fresh clone to streaming text, in one command:

    python3 examples/quickstart.py

Makes a virtual environment in .venv, builds and installs lily into it, writes a small random
checkpoint, and streams from it on the default device. The weights are random, so is the text.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / ("Scripts" if os.name == "nt" else "bin")
CHECKPOINT = ROOT / ".venv" / "random-checkpoint"


def run(*command: str | Path) -> None:
    print("$", *command, file=sys.stderr, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    if not (BIN / "python").exists():
        venv.create(ROOT / ".venv", with_pip=True)
    run(BIN / "python", "-m", "pip", "install", "--quiet", ".")
    if not (CHECKPOINT / "config.json").exists():
        run(BIN / "python", "examples/random_checkpoint.py", CHECKPOINT, "--preset", "heads")
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
    run(BIN / "lily", "generate", CHECKPOINT, prompt, "--max-tokens", "200", "--seed", "1")


if __name__ == "__main__":
    main()
