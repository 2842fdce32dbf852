"""Whole models on the Metal device over the software Metal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CONTRACTS, SOFTMETAL, metal_missing

import lily
from lily import _core, _testing
from model.compare import FAST_MEDIAN, relative_rms

MISSING = next((reason for op in CONTRACTS if (reason := metal_missing(op))), None)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

GREEDY = lily.Sampling(temperature=0)
ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples" / "demo_model" / "checkpoint"
LONG = "LILY_LONG" in os.environ
LENGTHS = [1, 5, 127, 128, 129, 700]


@pytest.fixture(autouse=True)
def no_reports() -> Iterator[None]:
    """What the software Metal complains of fails the test, wherever it came up."""
    yield
    if SOFTMETAL:
        for setting in ("mode", "fail_library", "chip", "system"):
            _testing.fake_set(setting, None)
        reports = _testing.fake_reports()
        assert not reports, "\n".join(reports)


def load(
    folder: Path, device: str, mode: str = "plain", precision: str = "float32", chunk: int = 32
) -> lily.Model:
    if device == "metal" and SOFTMETAL:
        _testing.fake_set("mode", mode)
    return lily.Model.load(folder, device=device, precision=precision, chunk=chunk)


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Iterator[tuple[lily.Model, lily.Model]]:
    """The tiny checkpoint in float32 on the CPU device and on the Metal device."""
    folder = checkpoint("tiny")
    with load(folder, "cpu") as cpu, load(folder, "metal") as metal:
        yield cpu, metal


def prompt(n: int) -> list[int]:
    return [(i * 37 + 11) % 280 for i in range(n)]


def drawn(
    model: lily.Model, tokens: int | list[int], count: int, sampling: lily.Sampling
) -> list[int]:
    """`count` tokens after some, or after a prompt of so many."""
    if isinstance(tokens, int):
        tokens = prompt(tokens)
    session = model.session(context=len(tokens) + count)
    session.prefill(tokens)
    with session.stream(count, sampling, stop_ids=()) as stream:
        for _ in stream:
            pass
        return list(stream.tokens)


@pytest.mark.parametrize("n", LENGTHS)
def test_greedy_tokens_are_those_of_the_cpu(models: tuple[lily.Model, lily.Model], n: int) -> None:
    cpu, metal = models
    assert drawn(metal, n, 64, GREEDY) == drawn(cpu, n, 64, GREEDY)


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[lily.Model, lily.Model]]:
    with load(DEMO, "cpu") as cpu, load(DEMO, "metal") as metal:
        yield cpu, metal


@pytest.mark.parametrize("n", LENGTHS if LONG else [5])
def test_the_demo_writes_what_the_cpu_writes(demo: tuple[lily.Model, lily.Model], n: int) -> None:
    cpu, metal = demo
    text = cpu.encode((ROOT / "examples/demo_model/README.md").read_text(encoding="utf-8"))[:n]
    assert drawn(metal, text, 64, GREEDY) == drawn(cpu, text, 64, GREEDY)


def test_bf16_stays_near_the_cpu_where_the_text_is_given(checkpoint: Callable[..., Path]) -> None:
    folder, tokens = checkpoint("tiny"), prompt(90)
    with load(folder, "cpu") as exact, load(folder, "metal", precision="fast") as metal:
        want = exact.session(context=100).score(tokens)
        got = metal.session(context=100).score(tokens)
        assert np.median(relative_rms(got, want)) <= FAST_MEDIAN
        session = metal.session(context=100)
        session.prefill(tokens[:60])
        stepped = [np.asarray(session.decode(token)) for token in tokens[60:]]
        assert np.median(relative_rms(stepped, want[60:])) <= FAST_MEDIAN


@pytest.mark.parametrize(
    "sampling",
    [
        lily.Sampling(temperature=0.8, seed=5),
        lily.Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=5),
        lily.Sampling(temperature=1.0, min_p=0.05, presence_penalty=0.5, seed=6),
    ],
)
def test_drawn_tokens_are_those_of_the_cpu(
    models: tuple[lily.Model, lily.Model], sampling: lily.Sampling
) -> None:
    cpu, metal = models
    assert drawn(metal, 5, 16, sampling) == drawn(cpu, 5, 16, sampling)


def test_logits_of_prefill_decode_and_score(models: tuple[lily.Model, lily.Model]) -> None:
    cpu, metal = (m.session(context=200) for m in models)
    for session in (cpu, metal):
        session.prefill(prompt(40))
    tokens = [3, 4, 5]
    a, b = np.asarray(cpu.score(tokens)), np.asarray(metal.score(tokens))
    assert np.abs(a - b).max() < 1e-4
    a, b = np.asarray(cpu.decode(7)), np.asarray(metal.decode(7))
    assert np.abs(a - b).max() < 1e-4


def test_a_prompt_in_pieces_gives_the_same_bits(models: tuple[lily.Model, lily.Model]) -> None:
    _, metal = models
    tokens = prompt(45)
    whole = metal.session(context=100)
    expected = np.asarray(whole.prefill(tokens)).copy()
    for cut in (1, 31, 33):
        session = metal.session(context=100)
        session.prefill(tokens[:cut])
        assert np.array_equal(np.asarray(session.prefill(tokens[cut:])), expected)


def test_a_heavier_pass_gives_the_same_bits(
    models: tuple[lily.Model, lily.Model], checkpoint: Callable[..., Path]
) -> None:
    # Larger tiles for more rows to an expert.
    _, light = models
    tokens = prompt(110)
    expected = np.asarray(light.session(context=120).prefill(tokens))
    with load(checkpoint("tiny"), "metal", chunk=128) as heavy:
        assert np.array_equal(np.asarray(heavy.session(context=120).prefill(tokens)), expected)


def test_snapshots_and_streams_that_are_cut(models: tuple[lily.Model, lily.Model]) -> None:
    _, metal = models
    expected = drawn(metal, 20, 12, GREEDY)
    session = metal.session(context=100)
    session.prefill(prompt(20))
    at = session.snapshot()
    for cut in (1, 4, 7):
        session.restore(at)
        stream = session.stream(12, GREEDY)
        for _ in range(cut):
            next(stream)
        stream.close()
        with session.stream(12 - cut, GREEDY, stop_ids=()) as rest:
            for _ in rest:
                pass
        assert [*session.tokens[20:], session.pending] == expected


def test_many_attention_blocks(
    models: tuple[lily.Model, lily.Model],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Blocks of one key and more; they grow after the 64th key and the 256th. 530 keys are more
    # than 256 blocks where split_kv is off.
    monkeypatch.setattr(_core, "Options", partial(_core.Options, attention_block=1))
    with load(checkpoint("tiny"), "metal") as split, split.without("split_kv") as kept:
        for n, model in ((1, split), (62, split), (252, split), (530, kept)):
            assert drawn(model, n, 6, GREEDY) == drawn(models[0], n, 6, GREEDY)


def test_an_int8_cache(checkpoint: Callable[..., Path]) -> None:
    if SOFTMETAL:
        _testing.fake_set("mode", "plain")
    found = []
    for device in ("cpu", "metal"):
        with lily.Model.load(
            checkpoint("tiny"), device=device, precision="float32", kv="int8", chunk=32
        ) as model:
            session = model.session(context=100)
            logits = np.asarray(session.prefill(prompt(45))).copy()
            at = session.fork()
            found.append((logits, np.asarray(session.decode(3)).copy()))
            # The fork's rows are its own.
            at.decode(7)
            session.decode(5)
            assert np.array_equal(np.asarray(at.decode(3)), np.asarray(again(model, 45, [7, 3])))
    for a, b in zip(*found, strict=True):
        assert np.abs(a - b).max() < 2e-3 * np.abs(a).max()


def again(model: lily.Model, n: int, tokens: list[int]) -> object:
    session = model.session(context=100)
    session.prefill(prompt(n))
    return [session.decode(token) for token in tokens][-1]


def be_an_m5() -> None:
    """From now on, for devices that are made; `no_reports` ends it."""
    if SOFTMETAL:
        _testing.fake_set("chip", "5")
        _testing.fake_set("system", "26.2")


@pytest.mark.parametrize("build", ["float32", "fast", "fast on an M5"])
def test_the_detector_finds_nothing(checkpoint: Callable[..., Path], build: str) -> None:
    precision = build.split()[0]
    if "M5" in build:
        be_an_m5()
    with load(checkpoint("tiny"), "metal", "detect", precision) as model:
        session = model.session(context=64)
        session.prefill(prompt(5))
        session.decode(3)
        for _ in session.stream(3, lily.Sampling(temperature=0.7, seed=1)):
            pass


def in_a_process(code: str, *arguments: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal can be an older system")
def test_an_older_system_gives_the_same_tokens(checkpoint: Callable[..., Path]) -> None:
    code = """
import sys
import lily
from lily import _testing
from model.compare import FAST_MEDIAN, relative_rms

_testing.fake_set("system", "14")
tokens = []
for device in ("cpu", "metal"):
    with lily.Model.load(sys.argv[1], device=device, precision="float32", chunk=32) as model:
        session = model.session(context=64)
        session.prefill([11, 48, 85])
        for _ in session.stream(4, lily.Sampling(temperature=0)):
            pass
        tokens.append(list(session.tokens))
assert "macOS Version 14" in model.info.device
assert tokens[0] == tokens[1]
print(_testing.fake_reports())
"""
    assert in_a_process(code, str(checkpoint("tiny"))) == "[]"


@pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal can be any chip")
def test_a_chip_with_tensor_operations(checkpoint: Callable[..., Path]) -> None:
    def logits(device: str, precision: str) -> Any:
        with load(checkpoint("tiny"), device, precision=precision) as model:
            assert ("tensor operations" in model.info.device) == (device == "metal")
            return np.asarray(model.session(context=64).score(prompt(40)))

    be_an_m5()
    exact = logits("cpu", "float32")
    # Weights in bf16 add little to what activations in bf16 cost on any device.
    found, expected = logits("metal", "fast"), logits("cpu", "fast")
    assert np.median(relative_rms(found, exact)) < 1.5 * np.median(relative_rms(expected, exact))


@pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal fails when told to")
def test_a_gpu_that_does_not_work_is_named() -> None:
    _testing.fake_set("fail_library", "1")
    name, warning = _testing.metal_or_cpu()
    assert name == "cpu"
    assert "metal: kernel " in warning and ": does not compile: made to fail" in warning
    assert _testing.metal_or_cpu() == ("metal", "")


@pytest.mark.skipif(not SOFTMETAL, reason="asks the software Metal")
def test_an_import_touches_no_metal() -> None:
    code = "import lily; from lily import _testing; print(_testing.fake_number('devices'))"
    assert in_a_process(code) == "0"
