"""The NumPy reference against what mlx-lm and transformers computed (README.md)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import random_checkpoint
from reference.model import ReferenceModel
from reference.weights import read_file, read_header

# Float32 rounding in 8 layers, in another order of summation: measured 1.7e-6 at most. An error
# of the arithmetic shows as 1e-3 or more.
TOLERANCE = 1e-5

CASES = sorted(p.stem for p in Path(__file__).parent.glob("*.safetensors"))


@dataclass(frozen=True)
class Golden:
    """One case: what was run, what came out, and its checkpoint, written again."""

    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = Path(__file__).parent / f"{request.param}.safetensors"
    about = json.loads(read_header(path)["__metadata__"]["case"])
    folder = random_checkpoint.write(
        tmp_path_factory.mktemp(path.stem), about["preset"], form=about["form"], seed=about["seed"]
    )
    return Golden(about, {name: t.read() for name, t in read_file(path).items()}, folder)


def relative_rms(x: NDArray[Any], want: NDArray[Any]) -> float:
    """RMS of the difference over RMS of `want`, in the worst row."""
    x, want = x.astype(np.float64), want.astype(np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2, -1) / np.mean(want**2, -1)).max())


def test_every_case_is_here() -> None:
    assert CASES == ["heads-mlx", "heads-published", "tiny-mlx", "tiny-published"]


def test_checkpoint_is_the_one_that_was_run(golden: Golden) -> None:
    data = (golden.folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == golden.about["sha256"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reference_agrees(golden: Golden, dtype: type[np.floating[Any]]) -> None:
    want, layer = golden.arrays, golden.about["layer"]
    model = ReferenceModel(golden.folder, dtype)
    top = model.config["num_experts_per_tok"]
    logits, margins = [], []
    for token in want["tokens"]:
        trace: dict[str, NDArray[Any]] = {}
        logits.append(model.step(int(token), trace))
        probs = [np.sort(v)[::-1] for name, v in trace.items() if name.endswith("router_probs")]
        margins.append([p[top - 1] - p[top] for p in probs])

    kept = np.array(logits)[want["positions"]]
    oracles = [name for name in want if name.endswith(".logits")]
    assert len(oracles) == (2 if golden.about["form"] == "mlx" else 1)
    for name in oracles:
        assert relative_rms(kept, want[name]) <= TOLERANCE, name

    state = model.states[layer][want["state_heads"]]
    assert relative_rms(state.reshape(1, -1), want["state"].reshape(1, -1)) <= TOLERANCE
    window = model.windows[layer]
    assert relative_rms(window.reshape(1, -1), want["conv"].reshape(1, -1)) <= TOLERANCE
    np.testing.assert_allclose(np.array(margins).T, want["router_margin"], atol=TOLERANCE)
