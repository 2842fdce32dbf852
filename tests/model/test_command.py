"""The command line as people run it: a process of its own, on a tiny random checkpoint."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import random_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose path has a space and letters that are not ASCII."""
    return str(random_checkpoint.write(tmp_path_factory.mktemp("tiny") / "modèle 小", "tiny"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that names no token that ends a text."""
    folder = random_checkpoint.write(tmp_path_factory.mktemp("endless"), "tiny")
    for path in folder.glob("*config.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        for part in (found, found.get("text_config", {})):
            for name in ("eos_token_id", "eos_token"):
                part.pop(name, None)
        path.write_text(json.dumps(found), encoding="utf-8")
    return str(folder)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "lily", *argv]


def lily(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv), input=text, capture_output=True, encoding="utf-8", timeout=120
    )


@contextlib.contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running command, killed if the test fails before it ends."""
    process = subprocess.Popen(
        command(*argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that runs the tests in the background has them ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_generate(folder: str) -> None:
    argv = ("generate", folder, "Once upon a time", "--max-tokens", "20", "--seed", "3")
    first, second = lily(*argv), lily(*argv)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.endswith("\n")
    counts, speeds = first.stderr.splitlines()
    assert counts.endswith(("generated, end: length", "generated, end: stop"))
    assert "(0 reused)" in counts
    assert speeds.endswith("seed 3")
    other = lily(*argv[:-1], "4")
    assert other.stdout != first.stdout


def test_generate_matches_the_api(folder: str) -> None:
    import lily as api

    done = lily(
        "generate", folder, "Grüße 👩‍👩‍👧", "--max-tokens", "16", "--temperature", "0", "--quiet"
    )
    with api.Model.load(folder) as model:
        text = model.generate("Grüße 👩‍👩‍👧", max_tokens=16, temperature=0).text()
    assert (done.stdout, done.stderr) == (text + "\n", "")


def test_chat_reuses_the_session(folder: str) -> None:
    done = lily(
        "chat", folder, "--max-tokens", "8", "--no-thinking", text="Hi\nAnd now?\n/reset\nHi\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3


def test_info_and_plan(folder: str) -> None:
    info = lily("info", folder, "--json")
    assert info.returncode == 0, info.stderr
    found = json.loads(info.stdout)
    assert found["config"]["num_experts"] == 8
    assert found["form"] == "mlx"
    plan = json.loads(lily("plan", folder, "--json", "--context", "1000").stdout)
    assert plan["weights"] == found["memory"]["weights"]
    assert plan["total"] > plan["weights"]
    without = json.loads(lily("plan", folder, "--json", "--ablate", "token_handover").stdout)
    assert without["token_dispatches"] == plan["token_dispatches"] + 1
    for name in ("info", "plan"):
        readable = lily(name, folder)
        assert readable.returncode == 0
        assert "largest context" in readable.stdout


def test_bench(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = (
        "--contexts 8,40 --prefill 20 --decode 6 --rounds 2 --peers none"
        " --ablate token_handover --stages"
    )
    table = tmp_path / "bench.csv"
    done = lily("bench", folder, *options.split(), "--json", str(out), "--csv", str(table))
    assert done.returncode == 0, done.stderr
    assert "decode after 40" in done.stdout
    report = json.loads(out.read_text(encoding="utf-8"))
    decoded = [r for r in report["rounds"] if r["measure"] == "decode"]
    assert [r["steps"] for r in decoded] == [6] * 8
    assert {r["engine"] for r in decoded} == {"lily", "without token_handover"}
    assert all(r["tok_s"] > 0 for r in report["rounds"])
    assert all(0 < r["device_s"] < 2 * r["seconds"] for r in report["rounds"])
    assert report["engines"][0]["peak_bytes"] > 10**7
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    assert [float(row["seconds"]) for row in rows] == pytest.approx(
        [r["seconds"] for r in report["rounds"]], abs=1e-6
    )
    prefill, decode = report["stages"]
    assert (prefill["pass"], decode["pass"]) == ("prefill 20", "decode after 40")
    stages = {(s["stage"], s["kernel"]): s for s in decode["stages"]}
    assert stages["experts", "experts_up"]["gb_s"] > 0
    assert sum(s["dispatches"] for s in decode["stages"]) == pytest.approx(8 * 6 + 2)
    assert "experts: experts_up" in done.stdout and "the device was busy:" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "FOLDER", "x" * 700, "--context", "20"], "prompt: 700 tokens"),
        (["generate", "FOLDER/absent", "x"], "no such folder"),
        (["plan", "FOLDER/config.json"], "a file, expected the folder"),
        (["generate", "FOLDER", "x", "--context", str(2**31 - 1)], "context:"),
        (["generate", "FOLDER", "x", "--memory-limit", "1MB"], ""),
        (["bench", "FOLDER", "--ablate", "x"], "ablate: x, expected some of"),
        (["bench", "FOLDER", "--contexts", "2000000000"], "context:"),
    ],
)
def test_errors_are_one_line(argv: list[str], said: str, folder: str) -> None:
    done = lily(*(part.replace("FOLDER", folder) for part in argv))
    first, *hints = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert first.startswith("lily: error: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in hints)


def test_ctrl_c_ends_a_running_generation(endless: str) -> None:
    with started("generate", endless, "x", "--seed", "1", "--context", "200000") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert time.monotonic() - pressed < 20
        assert errors == b""
        rest.decode()  # whole characters, whenever it stops


def test_a_reader_that_leaves_ends_it_quietly(endless: str) -> None:
    with started("generate", endless, "x", "--seed", "1", "--context", "200000") as process:
        assert process.stdout
        assert process.stderr
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""
