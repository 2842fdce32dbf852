"""Perplexity: the numbers, how a text is cut, and what is refused."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import lily
from lily import cli
from reference.model import ReferenceModel

scoring = importlib.import_module("lily.perplexity")  # the package's name is the function

REFERENCE_REL = 1e-5  # the float32 engine's logits are within 1e-5 of the reference's
TEXT = "Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind. 👩‍👩‍👧 " * 3


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(x) % 512 for x in np.random.PCG64(seed).random_raw(n)]


def plain_nats(logits: NDArray[Any], targets: list[int]) -> list[float]:
    """-log softmax, as a textbook has it."""
    found = []
    for row, target in zip(logits.astype(np.float64), targets, strict=True):
        p = np.exp(row - row.max())
        found.append(-math.log(p[target] / p.sum()))
    return found


# The numbers


def test_against_the_reference(tiny: lily.Model, checkpoint: Callable[..., Path]) -> None:
    tokens = ids(60)
    nats = []
    for start in (0, 25, 50):
        model = ReferenceModel(checkpoint("tiny"), np.float64)
        window = tokens[start : start + 25]
        logits = np.array([model.step(token) for token in window[:-1]])
        nats += plain_nats(logits, window[1:])
    found = lily.perplexity(tiny, tokens, window=25)
    assert (found.positions, found.tokens, found.window) == (57, 60, 25)
    assert found.nats_per_token == pytest.approx(np.mean(nats), rel=REFERENCE_REL)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=10 * REFERENCE_REL)


def test_against_the_engines_own_logits(tiny: lily.Model) -> None:
    tokens = ids(70)
    with tiny.session() as session:
        nats = plain_nats(session.score(tokens[:-1]), tokens[1:])
    found = lily.perplexity(tiny, tokens)
    assert found.positions == 69
    assert found.nats_per_token == pytest.approx(np.mean(nats), rel=1e-12)


def test_bits_per_byte(tiny: lily.Model) -> None:
    found = lily.perplexity(tiny, TEXT, window=50)
    tokens = tiny.encode(TEXT)
    scored = [token for i, token in enumerate(tokens) if i % 50]
    n_bytes = sum(len(tiny.tokenizer.token_bytes(token)) for token in scored)
    assert n_bytes < len(TEXT.encode())
    assert found.positions == len(scored)
    want = found.nats_per_token * len(scored) / math.log(2) / n_bytes
    assert found.bits_per_byte == pytest.approx(want, rel=1e-12)
    assert lily.perplexity(tiny, tokens, window=50).bits_per_byte == found.bits_per_byte


def test_pieces_do_not_change_the_result(tiny: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ids(100)
    whole = lily.perplexity(tiny, tokens, window=90)
    for scored, block in ((1, 1), (512 * 7, 512 * 3), (512 * 32, 512)):
        monkeypatch.setattr(scoring, "SCORED_VALUES", scored)
        monkeypatch.setattr(scoring, "BLOCK_VALUES", block)
        again = lily.perplexity(tiny, tokens, window=90)
        assert again.nats_per_token == whole.nats_per_token


def test_extreme_logits() -> None:
    rows = np.array([[3e4, 0, -3e4], [0, 0, 0], [-1e30, 0, 0]], np.float32)
    nats = scoring.token_nats(rows, np.array([2, 1, 0], np.uint32))
    assert nats == pytest.approx([6e4, math.log(3), 1e30 + math.log(2)])
    assert scoring.exp(1e4) == math.inf


class Pretend:
    """A model of four tokens that says what it is told to."""

    def __init__(self, logits: list[float]) -> None:
        self._row = np.array(logits, np.float32)
        self._tokenizer = None
        self.info = SimpleNamespace(
            context=64,
            device="pretend",
            config=SimpleNamespace(vocab_size=4),
            memory=SimpleNamespace(native_context=100),
        )

    def session(self, context: int) -> Pretend:
        self.context = context
        return self

    def reset(self) -> None: ...

    def score(self, tokens: NDArray[np.uint32]) -> NDArray[np.float32]:
        return np.tile(self._row, (len(tokens), 1))

    def __enter__(self) -> Pretend:
        return self

    def __exit__(self, *_: object) -> None: ...


def pretend(*logits: float) -> Any:
    return Pretend(list(logits))


def test_padding_counts() -> None:
    """A model whose four tokens are equally likely, whether or not a text can have them all."""
    found = lily.perplexity(pretend(1, 1, 1, 1), [0, 1, 0, 1])
    assert found.perplexity == pytest.approx(4)
    assert found.bits_per_byte is None
    assert "bits per byte       –" in str(found)


def test_logits_that_are_not_finite() -> None:
    with pytest.raises(lily.DeviceError, match="pretend: position 0: logits that are not finite"):
        lily.perplexity(pretend(0, math.nan, 0, 0), [0, 1, 0])


# Windows


def test_windows() -> None:
    cut = scoring.windows
    assert cut(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert cut(9, 4) == [(0, 4), (4, 8)]  # a last token alone has nothing before it
    assert cut(8, 100) == [(0, 8)]
    assert cut(10, 4, 3) == [(0, 4)]
    assert cut(10, 4, 4) == [(0, 4), (4, 6)]
    assert cut(10, 4, 1) == [(0, 2)]
    assert cut(2, 2) == [(0, 2)]


@given(st.integers(2, 300), st.integers(2, 80), st.none() | st.integers(1, 400))
def test_every_token_but_a_windows_first_is_scored(n: int, window: int, most: int | None) -> None:
    spans = scoring.windows(n, window, most)
    scored = [i for start, stop in spans for i in range(start + 1, stop)]
    every = [i for i in range(n) if i % window]
    assert scored == (every if most is None else every[:most])
    assert all(start % window == 0 and 2 <= stop - start <= window for start, stop in spans)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 1 << 20))
def test_chunks_cover_a_window(start: int, n: int, vocabulary: int) -> None:
    found = list(scoring.chunks(start, start + n, vocabulary))
    assert [i for a, b in found for i in range(a, b)] == list(range(start, start + n))
    assert all((b - a) * vocabulary <= max(vocabulary, scoring.SCORED_VALUES) for a, b in found)


def test_a_limit_of_positions(tiny: lily.Model) -> None:
    tokens = ids(60)
    done: list[tuple[int, int]] = []
    cut = lily.perplexity(
        tiny, tokens, window=20, positions=25, progress=lambda *at: done.append(at)
    )
    assert (cut.positions, cut.tokens) == (25, 27)
    assert done == [(19, 25), (25, 25)]
    same = lily.perplexity(tiny, tokens[:27], window=20)
    assert same.nats_per_token == cut.nats_per_token


def test_the_default_window_is_no_more_than_the_context() -> None:
    model = pretend(0, 0, 0, 0)
    found = lily.perplexity(model, [0, 1] * 50)
    assert (found.window, model.context) == (64, 64)
    assert found.positions == 98


# Refusals


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        ([], {}, "the text's tokens: 0, expected at least 2"),
        ([1], {}, "the text's tokens: 1, expected at least 2"),
        ([1, 2], {"window": 1}, "window: 1, expected at least 2 tokens"),
        ([1, 2], {"positions": 0}, "positions: 0, expected at least 1"),
        ([1, 4, 1], {}, r"tokens\[1\]: 4, expected an id in \[0, 4\)"),
        ([1, -1], {}, r"tokens\[1\]: -1"),
    ],
)
def test_refusals(tokens: list[int], options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lily.perplexity(pretend(0, 0, 0, 0), tokens, **options)


def test_a_window_beyond_what_the_model_was_trained_for() -> None:
    with pytest.raises(lily.ContextError, match="window: 101 tokens, expected at most 100"):
        lily.perplexity(pretend(0, 0, 0, 0), [1, 2], window=101)


# The command


def test_command(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(checkpoint("tiny"))
    file = tmp_path / "text"
    file.write_text(TEXT, encoding="utf-8")
    assert cli.main(["perplexity", folder, str(file), "--window", "64", "--positions", "70"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line[:20].rstrip() for line in out.splitlines()] == [
        "perplexity", "nats per token", "bits per byte", "positions", "speed"
    ]  # fmt: skip
    assert "70, in windows of 64 tokens" in out

    argv = ["perplexity", folder, str(file), "--window", "64", "--json", "--precision", "float32"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "model", "revision", "device", "precision", "kv", "file", "text_sha256", "perplexity",
        "nats_per_token", "bits_per_byte", "positions", "tokens", "window", "seconds", "tok_s",
    }  # fmt: skip
    with lily.Model.load(folder, precision="float32") as model:
        want = lily.perplexity(model, TEXT, window=64)
    assert found["nats_per_token"] == want.nats_per_token
    assert (found["precision"], found["window"]) == ("float32", 64)


def test_command_reads_standard_input(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert cli.main(["perplexity", str(checkpoint("tiny")), "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "-"


@pytest.mark.parametrize("command", ["perplexity", "fidelity"])
@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", 2, "FILE: the text is empty"),
        (b"abc\xff", 2, "FILE: byte 3: expected UTF-8 text"),
        (b"a", 1, "the text's tokens: 1, expected at least 2"),
        (None, 1, "FILE: No such file or directory"),
    ],
)
def test_command_refuses(
    command: str,
    data: bytes | None,
    code: int,
    said: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text"
    if data is not None:
        file.write_bytes(data)
    assert cli.main([command, str(checkpoint("tiny")), str(file)]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"lily: error: {said.replace('FILE', str(file))}\n")
