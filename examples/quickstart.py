#!/usr/bin/env python3
"""From a fresh clone to streaming text, in one command:

    python3 examples/quickstart.py [PROMPT]

Makes a virtual environment in .venv, builds and installs lily into it, and streams from the demo
checkpoint on the default device.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / ("Scripts" if os.name == "nt" else "bin")
CHECKPOINT = Path("examples", "demo_model", "checkpoint")
PROMPT = "It was late in the evening when"


def run(*command: str | Path, before: str = "") -> None:
    print("$", *command, file=sys.stderr, flush=True)
    print(before, end="", flush=True)
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    if not (BIN / "python").exists():
        venv.create(ROOT / ".venv", with_pip=True)
    run(BIN / "python", "-m", "pip", "install", "--quiet", ".")
    prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT
    command = (BIN / "lily", "generate", CHECKPOINT, prompt, "--max-tokens", "200", "--seed", "2")
    run(*command, before=prompt)


if __name__ == "__main__":
    main()
