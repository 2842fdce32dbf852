"""`lily serve` as people run it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "examples/demo_model/checkpoint"


def serve(*argv: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lily", "serve", *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise AssertionError("it said where it listens")


def test_it_serves_until_ctrl_c_which_ends_what_runs() -> None:
    ask = {
        "messages": [{"role": "user", "content": "Go on for ever."}],
        "stream": True,
        "logit_bias": {"4066": -100},
    }
    with serve(MODEL, "--port", "0", "--name", "alice", "--temperature", "0.5") as process:
        try:
            url = address(process)
            model = httpx.get(f"{url}/v1/models").json()["data"][0]
            assert model["id"] == "alice"
            assert model["sampling"]["temperature"] == 0.5
            text = ""
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=ask) as response:
                for part in response.iter_text():
                    if not text:
                        process.send_signal(signal.SIGINT)
                    text += part
            *_, last, end, _ = text.split("\n\n")
            assert end == "data: [DONE]"
            assert "stopping" in json.loads(last[6:])["error"]["message"]
            assert process.wait(20) == 130
            assert process.stdout is not None and process.stderr is not None
            assert "Traceback" not in process.stderr.read()
            assert process.stdout.read() == ""
        finally:
            process.kill()


def test_it_asks_for_the_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_API_KEY", "secret")
    with serve(MODEL, "--port", "0", "--host", "0.0.0.0") as process:
        try:
            url = address(process).replace("0.0.0.0", "127.0.0.1")
            assert httpx.get(f"{url}/v1/models").status_code == 401
            key = {"Authorization": "Bearer secret"}
            found = httpx.get(f"{url}/v1/models", headers=key).json()
            assert found["data"][0]["id"] == Path(MODEL).name
        finally:
            process.kill()


def test_without_a_key_beyond_this_machine_it_says_so() -> None:
    with serve(MODEL, "--port", "0", "--host", "0.0.0.0") as process:
        try:
            assert process.stderr is not None
            assert any("no --api-key" in process.stderr.readline() for _ in range(5))
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (("--port", "70000"), 2, "--port: 70000"),
        (("--parallel", "0"), 2, "--parallel"),
        (("--queue", "-1"), 2, "--queue: -1"),
        (("--temperature", "-1"), 2, "temperature: -1"),
        (("--max-body", "much"), 2, "--max-body"),
        (("--api-key", ""), 2, "--api-key"),
    ],
)
def test_wrong_options_are_refused_before_loading(
    wrong: tuple[str, str], code: int, said: str
) -> None:
    with serve("no/such/model", *wrong) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert said in error


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serve(MODEL, "--port", str(taken.getsockname()[1])) as process,
    ):
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "lily: error: " in error and "in use" in error


def test_without_fastapi_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('no', name='fastapi')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lily.cli import main; sys.exit(main(['serve', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "needs fastapi" in done.stderr and "lily[server]" in done.stderr
