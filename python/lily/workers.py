"""Other engines, each in a process of its own that is spoken to in lines of JSON.

`bench_peers.py` is what runs there; `lily.bench` and `lily.fidelity` say what is asked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily import bench_peers

PEERS = ("mlx-lm", "transformers", "llama-cpp-python")
MODULES = {"mlx-lm": "mlx_lm", "transformers": "transformers", "llama-cpp-python": "llama_cpp"}


class PeerError(Exception):
    """A peer could not load or failed; the others go on."""


@dataclass(frozen=True)
class About:
    """An engine that is loaded."""

    name: str
    version: str
    model: str
    detail: str
    n_tokens: int
    load_s: float


@dataclass(frozen=True)
class Peer:
    """Another engine and how to start it.

    Args:
        name: one of PEERS.
        model: a folder or hub id; for llama-cpp-python a .gguf file.
        python: its interpreter.
        threads: None leaves it to the engine.
        cpu: keep it off accelerators.
    """

    name: str
    model: str
    python: str = sys.executable
    threads: int | None = None
    cpu: bool = False


def peers(
    wanted: Sequence[str],
    source: str,
    models: Mapping[str, str],
    pythons: Mapping[str, str],
    *,
    threads: int | None,
    cpu: bool,
    names: Sequence[str] = PEERS,
) -> tuple[list[Peer], dict[str, str]]:
    """The peers to start, and for those asked for by name that cannot be, why.

    Args:
        wanted: names, or "auto" for those that are installed, or "none".
        source: the model that peers load which have none of their own in `models`.
        models, pythons: by peer.
        names: those that may be started at all.
    """
    found, absent = [], {}
    auto = "auto" in wanted
    for name in names:
        if not (auto or name in wanted):
            continue
        python, model = pythons.get(name, sys.executable), models.get(name)
        asked = name in wanted or model is not None or name in pythons
        if name not in pythons and importlib.util.find_spec(MODULES[name]) is None:
            if asked:
                absent[name] = "not installed"
        elif name == "llama-cpp-python" and model is None:
            absent[name] = f"needs a GGUF file: --peer-model {name}=FILE"
        else:
            found.append(Peer(name, model or source, python, threads, cpu))
    return found, absent


class Process:
    """A peer's process, with the engine loaded.

    Args:
        peer: what to start.
        setup: what else `bench_peers.py` needs to know: "work" and "context".

    Raises:
        PeerError: it did not start or did not load; says why.
    """

    def __init__(self, peer: Peer, setup: Mapping[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        variables = dict(os.environ)
        if peer.python != sys.executable:  # what is meant for this Python may confuse that one
            variables.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [peer.python, "-P", bench_peers.__file__],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{peer.python}: {error.strerror}") from None
        engine = {
            "name": peer.name,
            "model": peer.model,
            "threads": peer.threads,
            "cpu": peer.cpu,
        }
        self.about = About(**self.ask(engine | dict(setup)))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; a peer that fails is ended.

        Raises:
            PeerError: it failed, or its process has ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:
            self.close()
            raise
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "no message")
            code = self._process.returncode
            self.close()
            raise PeerError(f"ended with status {code}: {last[:200]}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            self.close()
            raise PeerError(reply["error"])
        self._peak = reply.pop("peak_bytes")
        return reply

    def peak_bytes(self) -> int:
        """Most memory that the process has held."""
        return int(self._peak)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
