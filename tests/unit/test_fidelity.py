"""Engines beside a reference: the figures, who is the reference, and what a peer's process says."""

from __future__ import annotations

import importlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lily
from lily import cli, fidelity
from lily.fidelity_engines import Candidate, PeerEngine
from lily.workers import About, Peer, PeerError
from reference.model import ReferenceModel

scoring = importlib.import_module("lily.perplexity")

TEXT = "Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind. 👩‍👩‍👧 " * 3
V = 4


class Fake:
    """An engine whose logits after a token are a row of a table."""

    def __init__(
        self, name: str, table: Any, *, piece: int = 2, fails_at: int | None = None
    ) -> None:
        self.about = About(name, "1", "m", "made up", V, 0.5)
        self._table = np.array(table, np.float32)
        self._piece = piece
        self._left = fails_at
        self.windows: list[list[int]] = []
        self.closed = False

    def logits(self, tokens: NDArray[np.uint32], n_vocabulary: int) -> Iterator[Any]:
        self.windows.append(tokens.tolist())
        for start in range(0, len(tokens), self._piece):
            if self._left == 0:
                raise PeerError("broke down")
            if self._left:
                self._left -= 1
            yield self._table[tokens[start : start + self._piece]]

    def close(self) -> None:
        self.closed = True


def candidate(engine: Fake | Exception, name: str = "") -> Candidate:
    def load(status: Callable[[str], None]) -> Any:
        if isinstance(engine, Exception):
            raise engine
        return engine

    return Candidate(name or engine.about.name, load)  # type: ignore[union-attr]


def compare(*engines: Fake, tokens: Any, **options: Any) -> fidelity.Report:
    return fidelity.run(
        [candidate(engine) for engine in engines],
        np.array(tokens, np.uint32),
        V,
        fidelity.Options(**{"window": 8, "positions": 1000} | options),
    )


def rows(report: fidelity.Report, group: int = 0) -> dict[str, fidelity.Row]:
    return {row.engine: row for row in report.groups()[group].rows}


def softmax(row: list[float]) -> list[float]:
    e = [math.exp(x) for x in row]
    return [x / sum(e) for x in e]


TABLE = [[1.0, 0.5, 0.0, -1.0], [0.0, 2.0, 2.0, 0.0], [-1.0, 3.0, 0.25, 0.0], [0, 0, 0, 0.5]]


# The figures


def test_an_engine_beside_itself() -> None:
    tokens = np.random.default_rng(0).integers(0, V, 300)
    table = np.random.default_rng(1).normal(0, 5, (V, V))
    report = compare(Fake("transformers", table), Fake("lily fast", table, piece=3), tokens=tokens)
    for group in report.groups():
        one, other = group.rows
        assert (other.kl, other.kl_max, other.logit_difference) == (0, 0, 0)
        assert (other.top1, other.relative_perplexity) == (1, 0)
        assert other.perplexity == one.perplexity
    assert [(group.name, group.positions) for group in report.groups()] == [
        ("all", 300 - 38),
        ("first 192", 192),
    ]


def test_figures_by_hand() -> None:
    """Three positions, after the tokens 0, 1 and 2; the second is a tie of the ids 1 and 2."""
    changed = [[1.0, 0.5, 0.0, -1.5], [0.0, 1.0, 2.0, 0.0], [-1.0, 3.0, 0.5, 0.0], [0, 0, 0, 0]]
    report = compare(Fake("transformers", TABLE), Fake("lily fast", changed), tokens=[0, 1, 2, 3])
    p = [softmax(row) for row in TABLE[:3]]
    q = [softmax(row) for row in changed[:3]]
    kl = [
        sum(a * math.log(a / b) for a, b in zip(x, y, strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    reference, engine = rows(report)["transformers"], rows(report)["lily fast"]
    assert reference.nats_per_token == pytest.approx(-np.mean(np.log([p[0][1], p[1][2], p[2][3]])))
    assert engine.nats_per_token == pytest.approx(-np.mean(np.log([q[0][1], q[1][2], q[2][3]])))
    assert engine.relative_perplexity == pytest.approx(engine.perplexity / reference.perplexity - 1)
    assert engine.top1 == pytest.approx(2 / 3)  # lowest of equals: 1 in the reference, 2 here
    assert engine.kl == pytest.approx(np.mean(kl))
    assert engine.kl_max == pytest.approx(max(kl))
    assert engine.logit_difference == 1


def test_ties_take_the_lowest_id() -> None:
    report = compare(
        Fake("transformers", [[0, 1, 1, 0]] * V),
        Fake("lily fast", [[0, 2, 2, 2]] * V),
        tokens=[0, 1, 2],
    )
    assert rows(report)["lily fast"].top1 == 1


def test_the_first_positions_are_a_group_of_their_own() -> None:
    """The token 3, where the engine is off, comes after 192 positions only."""
    changed = [*TABLE[:3], [5, 0, 0, 0]]
    tokens = [0, 1, 2] * 80 + [3] * 10
    report = compare(
        Fake("transformers", TABLE), Fake("lily fast", changed), tokens=tokens, window=10_000
    )
    assert rows(report, 0)["lily fast"].top1 < 1
    assert rows(report, 1)["lily fast"].top1 == 1
    assert rows(report, 1)["lily fast"].kl == 0


def test_windows_and_the_limit() -> None:
    one, two = Fake("transformers", TABLE), Fake("lily fast", TABLE, piece=5)
    report = compare(one, two, tokens=[0, 1, 2, 3] * 5, positions=9)
    assert one.windows == two.windows == [[0, 1, 2, 3, 0, 1, 2], [0, 1]]
    assert report.positions == 9
    assert (one.closed, two.closed) == (True, True)


def test_pieces_and_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tokens, a, b = rng.integers(0, V, 400), rng.normal(size=(V, V)), rng.normal(size=(V, V))

    def figures(piece: int, other: int) -> list[fidelity.Group]:
        engines = Fake("transformers", a, piece=piece), Fake("lily fast", b, piece=other)
        return compare(*engines, tokens=tokens, window=50).groups()

    whole = figures(100, 100)
    monkeypatch.setattr(scoring, "BLOCK_VALUES", 3 * V)
    assert figures(1, 7) == whole


def test_the_report() -> None:
    report = compare(
        Fake("transformers", TABLE), Fake("lily fast", TABLE[::-1]), tokens=[0, 1] * 200
    )
    report.absent["mlx-lm"] = "not installed"
    table = report.table()
    assert "mlx-lm: not measured: not installed" in table
    assert "first 192: 192 positions" in table
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(found) == {
        "date", "machine", "model", "text", "window", "positions", "reference", "engines",
        "absent", "groups",
    }  # fmt: skip
    assert found["reference"] == "transformers"
    assert [engine["name"] for engine in found["engines"]] == ["transformers", "lily fast"]
    assert {"version", "detail", "model", "load_s", "seconds", "tok_s"} <= set(found["engines"][0])
    assert [group["positions"] for group in found["groups"]] == [350, 192]
    assert set(found["groups"][0]["rows"][1]) == {
        "engine", "perplexity", "nats_per_token", "relative_perplexity", "top1", "kl", "kl_max",
        "logit_difference",
    }  # fmt: skip


# Who takes part


def run(*candidates: Candidate, **options: Any) -> fidelity.Report:
    return fidelity.run(
        candidates, np.array([0, 1, 2, 3], np.uint32), V, fidelity.Options(8, 100, **options)
    )


FAST, FLOAT32 = Fake("lily fast", TABLE), Fake("lily float32", TABLE)


def test_the_reference_is_the_best_that_runs() -> None:
    mlx, torch = Fake("mlx-lm", TABLE), Fake("transformers", TABLE)
    everyone = [candidate(engine) for engine in (FAST, FLOAT32, mlx, torch)]
    assert run(*everyone).reference == "transformers"
    assert run(*everyone[:3]).reference == "mlx-lm"
    assert run(*everyone[:2]).reference == "lily float32"
    report = run(*everyone, reference="lily float32")
    assert [m.about.name for m in report.measured] == [
        "lily float32", "lily fast", "mlx-lm", "transformers"
    ]  # fmt: skip


def test_a_reference_that_fails_gives_way() -> None:
    early = candidate(PeerError("no such model"), "transformers")
    late = candidate(Fake("mlx-lm", TABLE, fails_at=1))
    report = run(candidate(FAST), candidate(FLOAT32), early, late)
    assert report.reference == "lily float32"
    assert report.absent == {"transformers": "no such model", "mlx-lm": "broke down"}
    assert rows(report)["lily fast"].kl == 0


def test_a_reference_asked_for_does_not_give_way() -> None:
    broken = candidate(PeerError("no such model"), "transformers")
    with pytest.raises(lily.Error, match="no reference: transformers: no such model"):
        run(candidate(FAST), candidate(FLOAT32), broken, reference="transformers")
    with pytest.raises(lily.Error, match="no reference: none of transformers"):
        run(candidate(FAST), candidate(FLOAT32), reference="transformers")


@pytest.mark.parametrize(
    "error",
    [
        PeerError("x"),
        lily.DeviceError("too large\nhint: a smaller one"),
        MemoryError(),
        OSError(28, "No space left"),
    ],
)
def test_an_engine_that_cannot_run_is_noted(error: Exception) -> None:
    report = run(candidate(FAST), candidate(FLOAT32), candidate(error, "mlx-lm"))
    assert set(report.absent) == {"mlx-lm"}
    assert "hint" not in report.absent["mlx-lm"]
    assert report.absent["mlx-lm"]


def test_lily_itself_must_run() -> None:
    with pytest.raises(lily.DeviceError, match="too large"):
        run(candidate(lily.DeviceError("too large"), "lily fast"), candidate(FLOAT32))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (np.zeros((V, V + 1)), "5 logits a token, expected 4"),
        (np.full((V, V), np.nan), "position 0: logits that are not finite"),
    ],
)
def test_logits_that_cannot_be(table: Any, said: str) -> None:
    report = run(candidate(FAST), candidate(FLOAT32), candidate(Fake("mlx-lm", table)))
    assert report.absent["mlx-lm"] == said


def test_a_disk_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=47))
    with pytest.raises(lily.Error, match="logits at 3 positions\nhint: fewer --positions"):
        run(candidate(FAST), candidate(FLOAT32))


# Peers in their processes

FAKE_PEER = """
import json, sys
import numpy as np

TABLE = np.array({table}, np.float32)

def answer(**reply):
    print(json.dumps(reply | {{"peak_bytes": 1}}), flush=True)

setup = json.loads(sys.stdin.readline())
assert setup["work"] == "scores", setup
answer(name=setup["name"], version="9", model=setup["model"], detail="fake", n_tokens=4, load_s=0)
for line in sys.stdin:
    request = json.loads(line)
    if "score" in request:
        window = request["score"]
        answer()
        continue
    start, stop = request["rows"]
    rows = TABLE[window[start:stop]]
    {misdeed}
    rows.tofile(request["into"])
    answer(shape=list(rows.shape))
"""


def fake_python(folder: Path, script: str) -> str:
    """An interpreter that runs `script`, whatever it is asked to."""
    (folder / "peer.py").write_text(script, encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "peer.py"}"\n')
    python.chmod(0o755)
    return str(python)


def peer(python: str) -> Candidate:
    return Candidate(
        "mlx-lm", lambda _: PeerEngine(Peer("mlx-lm", "m", python, cpu=True), window=8)
    )


def test_a_peer_hands_its_logits_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORED_VALUES", 2 * V)  # two rows at a time
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(fidelity.tempfile, "tempdir", str(temporary))
    python = fake_python(tmp_path, FAKE_PEER.format(table=TABLE, misdeed=""))
    report = run(candidate(FAST), candidate(FLOAT32), peer(python))
    assert report.reference == "mlx-lm"
    assert report.measured[0].about.version == "9"
    assert rows(report)["lily fast"].kl == 0
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        ("sys.exit('out of breath')", "ended with status 1: out of breath"),
        ("answer(error='RuntimeError: no'); sys.exit()", "RuntimeError: no"),
        ("rows = rows[:-1]", "2 rows of logits for a window, expected 3"),
        ("rows = rows[:, :2]", "2 logits a token, expected 4"),
    ],
)
def test_a_peer_that_misbehaves(misdeed: str, said: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path, FAKE_PEER.format(table=TABLE, misdeed=misdeed))
    report = run(candidate(FAST), candidate(FLOAT32), peer(python))
    assert report.absent == {"mlx-lm": said}


TORCH = """
import contextlib
import numpy as np
float32, __version__ = "f32", "2"
inference_mode = contextlib.nullcontext
set_num_threads = lambda n: None
get_num_threads = lambda: 7
class Array:
    def __init__(self, values): self.values = np.array(values)
    def __getitem__(self, key): return Array(self.values[key])
    def float(self): return self
    def numpy(self): return self.values
tensor = Array
"""
TRANSFORMERS = """
from types import SimpleNamespace as S
import numpy as np, torch
__version__ = "5"
TABLE = np.array({table}, np.float32)
class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, model, dtype):
        assert dtype == torch.float32
        print("a word on standard output")
        self = cls()
        self.config = S(get_text_config=lambda: S(vocab_size=4))
        return self
    def eval(self): return self
    def base_model(self, input_ids, use_cache): return S(last_hidden_state=input_ids)
    def get_output_embeddings(self): return lambda hidden: torch.Array(TABLE[hidden.values])
"""


def test_the_process_of_a_peer(tmp_path: Path) -> None:
    """`bench_peers.py` itself, with packages that pretend."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "transformers.py").write_text(TRANSFORMERS.format(table=TABLE))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$2"\n')
    python.chmod(0o755)
    made = Candidate(
        "transformers", lambda _: PeerEngine(Peer("transformers", "m", str(python)), window=8)
    )
    report = run(candidate(FAST), made)
    assert report.reference == "transformers"
    assert report.measured[0].about.version == "5, torch 2"
    assert report.measured[0].about.detail == "cpu, float32, 7 threads"
    assert rows(report)["lily fast"].kl == 0


# The whole of it, on the tiny checkpoint


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_lily_in_both_precisions(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = checkpoint("tiny")
    report = fidelity.measure(str(folder), TEXT, window=40, positions=90)
    assert report.absent == {}
    found = rows(report)
    assert list(found) == ["lily float32", "lily fast"]

    with lily.Model.load(folder) as fast, lily.Model.load(folder, precision="float32") as exact:
        tokens = exact.encode(TEXT)
        for name, model in (("lily fast", fast), ("lily float32", exact)):
            alone = lily.perplexity(model, tokens, window=40, positions=90)
            assert found[name].nats_per_token == alone.nats_per_token
        kl = []
        for start, stop in scoring.windows(len(tokens), 40, 90):
            p, q = (
                log_softmax(model.session().score(tokens[start : stop - 1]))
                for model in (exact, fast)
            )
            kl += np.sum(np.exp(p) * (p - q), axis=1).tolist()
    assert found["lily fast"].kl == pytest.approx(np.mean(kl), rel=1e-9)
    assert found["lily fast"].kl_max == pytest.approx(max(kl), rel=1e-9)
    assert 0.5 < found["lily fast"].top1 <= 1


def log_softmax(rows: NDArray[Any]) -> NDArray[np.float64]:
    wide: NDArray[np.float64] = rows.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


def test_a_peer_that_is_the_numpy_reference(
    checkpoint: Callable[..., Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: a peer's process that steps tests/reference in float64."""
    folder = checkpoint("tiny")
    script = f"""
        import json, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import numpy as np
        from reference.model import ReferenceModel

        def answer(**reply):
            print(json.dumps(reply | {{"peak_bytes": 1}}), flush=True)

        setup = json.loads(sys.stdin.readline())
        answer(name=setup["name"], version="0", model=setup["model"], detail="", n_tokens=512,
               load_s=0)
        for line in sys.stdin:
            request = json.loads(line)
            if "score" in request:
                window, model = request["score"], ReferenceModel({str(folder)!r}, np.float64)
                answer()
                continue
            start, stop = request["rows"]
            rows = np.array([model.step(t) for t in window[start:stop]], np.float32)
            rows.tofile(request["into"])
            answer(shape=list(rows.shape))
    """
    python = fake_python(tmp_path, textwrap.dedent(script))
    out = tmp_path / "report.json"
    argv = ["fidelity", str(folder), str(text), "--window", "30", "--positions", "50"]
    argv += ["--peer-python", f"mlx-lm={python}", "--json", str(out), "--peers", "mlx-lm"]
    assert cli.main(argv) == 0
    assert "  mlx-lm" in capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["reference"] == "mlx-lm"
    assert found["text"]["bytes"] == len(TEXT.encode())
    assert found["model"]["form"] == "mlx"
    assert len(found["model"]["fingerprint"]) == 64
    assert [len(f["sha256"]) for f in found["model"]["files"].values()] == [64]
    figures = {row["engine"]: row for row in found["groups"][0]["rows"]}
    assert figures["lily float32"]["kl"] < 1e-9
    assert figures["lily float32"]["top1"] == 1
    assert abs(figures["lily float32"]["relative_perplexity"]) < 1e-5
    assert figures["lily fast"]["kl"] < 0.05

    # And what a plain computation says of that reference.
    with lily.Model.load(folder) as model:
        tokens = model.encode(TEXT)
    nats = []
    for start, stop in scoring.windows(len(tokens), 30, 50):
        model_64 = ReferenceModel(folder, np.float64)
        logits = np.array([model_64.step(t) for t in tokens[start : stop - 1]])
        scores = log_softmax(logits)
        nats += [-scores[i, t] for i, t in enumerate(tokens[start + 1 : stop])]
    assert figures["mlx-lm"]["nats_per_token"] == pytest.approx(np.mean(nats), rel=1e-6)


def test_peers_that_are_not_there(
    checkpoint: Callable[..., Path],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    argv = ["fidelity", str(checkpoint("tiny")), str(text), "--positions", "20", "--json", "-"]
    assert cli.main([*argv, "--peers", "transformers,mlx-lm"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["absent"] == {"mlx-lm": "not installed", "transformers": "not installed"}
    assert found["reference"] == "lily float32"
    assert [group["name"] for group in found["groups"]] == ["all"]

    assert cli.main([*argv, "--reference", "transformers"]) == 1
    assert "no reference: transformers: not installed" in capsys.readouterr().err


def test_mlx_lm_does_not_run_the_published_form(checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint("tiny", form="published"))
    report = fidelity.measure(
        folder, TEXT, positions=20, wanted=["mlx-lm"], pythons={"mlx-lm": "/no/such/python"}
    )
    assert report.absent == {"mlx-lm": "it rounds norm weights of the published form to bf16"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--peers", "llama-cpp-python"], "--peers: 'llama-cpp-python', expected auto, none"),
        (["--peer-python", "vllm=x"], "--peer-python: 'vllm=x'"),
        (["--reference", "fast"], "--reference: invalid choice"),
        (["--positions", "0"], "--positions: '0'"),
    ],
)
def test_wrong_usage(
    argv: list[str], said: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fidelity", "folder", str(text), *argv]) == 2
    assert said in capsys.readouterr().err
