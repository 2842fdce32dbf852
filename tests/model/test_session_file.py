"""Sessions go to a file and come back, in another process too; wrong files are refused.

LILY_KILLS sets how often a process is killed while it saves.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily import session_file

ROUNDS = int(os.environ.get("LILY_KILLS", "4"))
GREEDY = lily.Sampling.greedy()
TOKENS = np.random.default_rng(5).integers(0, 280, 400).tolist()


def continuation(session: lily.Session, n: int = 12) -> list[int]:
    """What it says next; a session of no tokens is asked something first."""
    if session.position == 0:
        session.prefill(TOKENS[:5])
    return [p.token for p in session.stream(n, GREEDY, stop_ids=()) if p.token is not None]


def opened(model: lily.Model, n: int, drawn: int = 0) -> lily.Session:
    session = model.session(600)
    if n:
        session.prefill(TOKENS[:n])
    if drawn:
        continuation(session, drawn)
    return session


CASES = [(0, 0), (1, 0), (40, 0), (40, 1), (40, 7), (129, 0), (390, 5)]

CONTINUE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import lily, test_session_file as t
with lily.Model.load(sys.argv[2], precision="float32", chunk=32) as model:
    for path in sys.argv[3:]:
        session = lily.Session.load(path, model)
        print(json.dumps([session.context, session.exact, t.continuation(session)]))
"""


def python(code: str, folder: Path, *args: str) -> list[str]:
    paths = [str(Path(__file__).parent), *sys.path]
    return [sys.executable, "-c", code, json.dumps(paths), str(folder), *args]


def test_sessions_go_on_in_a_new_process(
    tiny: lily.Model, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    sessions = [opened(tiny, *case) for case in CASES]
    paths = [str(tmp_path / f"session {i} é") for i in range(len(CASES))]
    for session, path in zip(sessions, paths, strict=True):
        session.save(path)
    exact = [s.exact for s in sessions]
    expected = [[600, e, continuation(s)] for s, e in zip(sessions, exact, strict=True)]
    command = python(CONTINUE, checkpoint("tiny"), *paths)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_session_is_the_saved_one(
    checkpoint: Callable[..., Path], tmp_path: Path, kv: Any, case: tuple[int, int]
) -> None:
    with lily.Model.load(checkpoint("tiny"), chunk=32, kv=kv) as model:
        session = opened(model, *case)
        session.save(tmp_path / "s")
        loaded = model.load_session(tmp_path / "s")
        assert loaded.tokens == session.tokens
        assert loaded.pending == session.pending
        assert loaded.exact is session.exact
        assert (loaded.logits is None) == (session.logits is None)
        if session.logits is not None:
            assert np.array_equal(np.asarray(loaded.logits), np.asarray(session.logits))
        sampling = lily.Sampling(presence_penalty=1.5, temperature=0)  # needs the prompt's length
        if session.position:
            drawn = [[p.token for p in s.stream(9, sampling)] for s in (session, loaded)]
            assert drawn[0] == drawn[1]
        session.save(tmp_path / "again")
        other = model.load_session(tmp_path / "again", context=450)
        assert other.context == 450
        other.prefill(TOKENS[:30])
        session.prefill(TOKENS[:30])
        assert np.array_equal(np.asarray(other.logits), np.asarray(session.logits))


def test_a_session_that_does_not_fit_is_refused(tiny: lily.Model, tmp_path: Path) -> None:
    opened(tiny, 40).save(tmp_path / "s")
    with pytest.raises(lily.ContextError, match="40 tokens, expected at most 30"):
        tiny.load_session(tmp_path / "s", context=30)
    with pytest.raises(ValueError, match="context: 0"):
        tiny.load_session(tmp_path / "s", context=0)
    with pytest.raises(FileNotFoundError):
        tiny.load_session(tmp_path / "none")


def test_only_rows_in_use_are_written(tiny: lily.Model, tmp_path: Path) -> None:
    sizes = []
    for n in (100, 300):
        opened(tiny, n).save(tmp_path / "s")
        sizes.append((tmp_path / "s").stat().st_size)
    row = tiny.info.memory.per_1000_tokens // 1000
    assert sizes[1] - sizes[0] == pytest.approx(200 * (row + 4), abs=8)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "precision: found 'float32', expected 'fast'"),
        ({"precision": "float32", "kv": "int8"}, "kv: found 'float32', expected 'int8'"),
    ],
)
def test_a_file_of_another_mode_is_refused(
    tiny: lily.Model,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    options: dict[str, Any],
    field: str,
) -> None:
    opened(tiny, 10).save(tmp_path / "s")
    with (
        lily.Model.load(checkpoint("tiny"), chunk=32, **options) as other,
        pytest.raises(lily.SessionFileError, match=field),
    ):
        other.load_session(tmp_path / "s")


@pytest.mark.parametrize(
    ("preset", "options", "field"),
    [("tiny", {"seed": 9}, "weights: found "), ("heads", {}, r"config\.\w+: found ")],
)
def test_a_file_of_another_model_is_refused(
    tiny: lily.Model,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    preset: str,
    options: dict[str, Any],
    field: str,
) -> None:
    opened(tiny, 10).save(tmp_path / "s")
    with (
        lily.Model.load(checkpoint(preset, **options), precision="float32") as other,
        pytest.raises(lily.SessionFileError, match=field),
    ):
        other.load_session(tmp_path / "s")


def test_with_another_version_of_lily_it_is_no_longer_exact(
    tiny: lily.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tiny, 10).save(tmp_path / "s")
    assert tiny.load_session(tmp_path / "s").exact
    monkeypatch.setattr(lily, "__version__", "0.0.0")
    assert not tiny.load_session(tmp_path / "s").exact


@pytest.fixture(scope="module")
def saved(tiny: lily.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "s"
    opened(tiny, 33, 4).save(path)
    return path


@given(st.data())
def test_a_damaged_file_is_refused(tiny: lily.Model, saved: Path, data: st.DataObject) -> None:
    whole = saved.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, 900))
    broken = bytearray(whole)
    match data.draw(st.sampled_from(["change", "cut", "longer"])):
        case "change":
            broken[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del broken[at:]
        case "longer":
            broken += b"\0"
    path = saved.with_name("broken")
    path.write_bytes(broken)
    with pytest.raises(lily.SessionFileError, match=r"broken: "):
        tiny.load_session(path)


def rewritten(whole: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header, all checksums right."""
    start = struct.Struct("<8sII32s")
    magic, version, n, _ = start.unpack(whole[: start.size])
    header = json.loads(whole[start.size : start.size + n])
    change(header)
    text = json.dumps(header).encode()
    body = start.pack(magic, version, len(text), sha256(text).digest())
    body += text + whole[start.size + n : -32]
    return body + sha256(body).digest()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", -1),
        ("position", 35),
        ("position", 2**31),
        ("position", True),
        ("position", "36"),
        ("position", None),
        ("context", 3),
        ("prompt_length", 37),
        ("exact_length", 37),
        ("exact_length", 1.0),
        ("pending", 2**31 - 1),
        ("pending", []),
        ("logits", True),
        ("logits", 0),
        ("bytes", 0),
        ("model", None),
        ("model", {}),
    ],
)
def test_a_forged_header_is_refused(
    tiny: lily.Model, saved: Path, tmp_path: Path, name: str, value: Any
) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "s"
    path.write_bytes(rewritten(whole, lambda header: None))
    assert tiny.load_session(path).position == 36
    path.write_bytes(rewritten(whole, lambda header: header.update({name: value})))
    with pytest.raises(lily.SessionFileError):
        tiny.load_session(path)


def test_a_token_out_of_range_is_refused(tiny: lily.Model, saved: Path, tmp_path: Path) -> None:
    whole = bytearray(saved.read_bytes())
    at = whole.index(np.array(TOKENS[:33], np.uint32).tobytes())
    whole[at + 3] = 0xFF
    (tmp_path / "s").write_bytes(rewritten(bytes(whole), lambda header: None))
    with pytest.raises(lily.SessionFileError, match=r"tokens\[0\]: \d+, expected below"):
        tiny.load_session(tmp_path / "s")


def test_newer_and_foreign_files_are_refused(tiny: lily.Model, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "s"
    path.write_bytes(whole[:8] + struct.pack("<I", session_file.VERSION + 1) + whole[12:])
    with pytest.raises(lily.SessionFileError, match="version: found 2, expected 1"):
        tiny.load_session(path)
    path.write_bytes(b"PK\3\4" * 100)
    with pytest.raises(lily.SessionFileError, match="first bytes: found"):
        tiny.load_session(path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tiny: lily.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    opened(tiny, 10).save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            opened(tiny, 20).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]
    opened(tiny, 20).save(path)
    assert tiny.load_session(path).position == 20
    with pytest.raises(FileNotFoundError):
        opened(tiny, 20).save(tmp_path / "none" / "s")


SAVE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import lily, test_session_file as t
with lily.Model.load(sys.argv[2], precision="float32", chunk=32) as model:
    sessions = [t.opened(model, 60), t.opened(model, 390, 5)]
    print("ready", flush=True)
    while True:
        for session in sessions:
            session.save(sys.argv[3])
"""


def test_a_process_killed_while_saving_leaves_a_whole_file(
    tiny: lily.Model, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    session = opened(tiny, 25)
    session.save(path)
    expected = {
        s.position: continuation(s) for s in (session, opened(tiny, 60), opened(tiny, 390, 5))
    }
    chance = random.Random(1)
    seen = set()
    for _ in range(ROUNDS):
        with subprocess.Popen(
            python(SAVE, checkpoint("tiny"), str(path)), stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
        loaded = tiny.load_session(path)
        seen.add(loaded.position)
        position = loaded.position
        assert continuation(loaded) == expected[position]
    assert seen <= {25, 60, 394}
