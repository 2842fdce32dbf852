"""The engine against what mlx-lm and transformers computed (tests/golden/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lily
from model.compare import FAST_MEDIAN, FLOAT32, relative_rms
from reference.weights import read_file, read_header

FOLDER = Path(__file__).parents[1] / "golden"
CASES = sorted(p.stem for p in FOLDER.glob("*.safetensors"))


class Case:
    def __init__(self, name: str, checkpoint: Callable[..., Path]) -> None:
        path = FOLDER / f"{name}.safetensors"
        self.about: dict[str, Any] = json.loads(read_header(path)["__metadata__"]["case"])
        self.arrays: dict[str, NDArray[Any]] = {k: t.read() for k, t in read_file(path).items()}
        self.folder = checkpoint(
            self.about["preset"], form=self.about["form"], seed=self.about["seed"]
        )
        self.tokens = self.arrays["tokens"].tolist()
        self.positions = self.arrays["positions"].astype(int)

    def oracles(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name in ("mlx_lm", "transformers"):
            if f"{name}.logits" in self.arrays:
                yield name, self.arrays[f"{name}.logits"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Case:
    return Case(request.param, checkpoint)


def prefilled(model: lily.Model, case: Case) -> NDArray[Any]:
    return model.session().score(case.tokens)[case.positions]


def stepped(model: lily.Model, case: Case) -> NDArray[Any]:
    session = model.session()
    return np.stack([np.asarray(session.decode(t)) for t in case.tokens])[case.positions]


def as_the_oracles_ran(model: lily.Model, case: Case) -> NDArray[Any]:
    """A prompt in one call, then token by token."""
    session, n = model.session(), case.about["prompt"]
    rows = list(session.score(case.tokens[:n]))
    rows += [np.asarray(session.decode(t)) for t in case.tokens[n:]]
    return np.stack(rows)[case.positions]


@pytest.mark.parametrize("run", [prefilled, stepped, as_the_oracles_ran])
def test_float32_logits_equal_the_oracles(case: Case, run: Callable[..., NDArray[Any]]) -> None:
    with lily.Model.load(case.folder, precision="float32") as model:
        logits = run(model, case)
    for name, want in case.oracles():
        assert relative_rms(logits, want).max() <= FLOAT32, name


@pytest.mark.parametrize("run", [prefilled, stepped])
def test_fast_logits_are_near_the_oracles(case: Case, run: Callable[..., NDArray[Any]]) -> None:
    with lily.Model.load(case.folder) as model:
        logits = run(model, case)
    for name, want in case.oracles():
        assert np.median(relative_rms(logits, want)) <= FAST_MEDIAN, name


def test_float32_states_equal_the_oracle(case: Case) -> None:
    layer = case.about["layer"]
    with lily.Model.load(case.folder, precision="float32") as model:
        kinds = model.info.config.layer_types[:layer]
        n = kinds.count("linear_attention")
        session = model.session()
        session.prefill(case.tokens)
        want = case.arrays["state"]
        state = session._live().state(n).reshape(-1, *want.shape[1:])[case.arrays["state_heads"]]
        assert relative_rms(state.ravel(), want.ravel()) <= FLOAT32
        conv = case.arrays["conv"]
        assert relative_rms(session._live().conv(n), conv.ravel()) <= FLOAT32


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("precision", ["float32", "fast"])
def test_every_instruction_set(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, isa: str, precision: str
) -> None:
    case = Case("tiny-mlx", checkpoint)
    monkeypatch.setenv("LILY_CPU_ISA", isa)
    try:
        model = lily.Model.load(case.folder, precision=precision)
    except lily.DeviceError as error:
        pytest.skip(str(error))
    with model:
        assert isa in model.info.device
        for run in (prefilled, stepped):
            distance = relative_rms(run(model, case), case.arrays["transformers.logits"])
            if precision == "float32":
                assert distance.max() <= FLOAT32
            else:
                assert np.median(distance) <= FAST_MEDIAN
