"""Each example runs on a small checkpoint and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo_model" / "checkpoint"


def run(name: str, *arguments: str | Path, stdin: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, input=stdin.encode(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_generate(checkpoint: Callable[..., Path]) -> None:
    out = run("generate.py", checkpoint("tiny"), "Once upon a time")
    assert "tokens of prompt" in out


def test_chat(checkpoint: Callable[..., Path]) -> None:
    out = run("chat.py", checkpoint("tiny"), stdin="hello\nand again\n")
    assert out.count("reused") == 2


def test_tools() -> None:
    pytest.importorskip("llguidance")
    out = run("tools.py", DEMO)
    assert "answer: " in out
    assert "says: the lamp is " in out


def test_structured() -> None:
    pytest.importorskip("llguidance")
    out = run("structured.py", DEMO)
    assert "likes [" in out
    assert "beginning with" in out
    assert out.count("' ") >= 3


def test_sessions(checkpoint: Callable[..., Path]) -> None:
    out = run("sessions.py", checkpoint("tiny"))
    assert "after restore: the same logits" in out


def test_profile(checkpoint: Callable[..., Path]) -> None:
    out = run("stage_times.py", checkpoint("tiny"))
    for stage in ("delta", "attention", "experts", "head", "total"):
        assert out.count(f"\n{stage} ") == 2, out
