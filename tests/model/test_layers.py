"""Layer by layer: each is fed the reference's input, so an error shows where it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lily
from model.compare import FLOAT32, relative_rms
from reference.model import ReferenceModel

TOKENS = np.random.default_rng(8).integers(0, 283, 40).tolist()
SURE = 1e-3  # router margin beyond which bf16 rounding of one layer's input changes no choice
FAST_LAYER = 2e-2  # of what a layer adds: a few roundings to 8 bits in a row


class Probe:
    """Feeds each layer the reference's input, and keeps what it chose and left."""

    def __init__(self, trace: dict[str, NDArray[Any]]) -> None:
        self.trace = trace
        self.chosen: dict[str, set[int]] = {}
        self.output: dict[str, NDArray[np.float32]] = {}

    def __call__(
        self, stage: str, kernel: str, slots: dict[str, Any], seconds: float | None
    ) -> None:
        if not stage.startswith("layer."):
            return
        layer = f"layers.{stage.split('/')[0].removeprefix('layer.')}"
        if seconds is None and kernel in ("delta_project", "attend_project"):
            slots["x"][:] = self.trace[f"{layer}.input"]
        elif seconds is not None and kernel == "experts_up":
            self.chosen[layer] = set(slots["ids"].tolist())
        elif seconds is not None and kernel == "experts_down_add":
            self.output[layer] = slots["x"].copy()


def steps(folder: Path, precision: str) -> list[tuple[dict[str, NDArray[Any]], Probe]]:
    reference = ReferenceModel(folder, np.float64)
    found = []
    with lily.Model.load(folder, precision=precision) as model:
        session = model.session()
        for token in TOKENS:
            trace: dict[str, NDArray[Any]] = {}
            reference.step(token, trace)
            probe = Probe(trace)
            session.observe([token], probe)
            found.append((trace, probe))
    return found


def margin(trace: dict[str, NDArray[Any]], layer: str) -> float:
    ranked = np.sort(trace[f"{layer}.router_probs"])[::-1]
    k = len(trace[f"{layer}.chosen"])
    return float(ranked[k - 1] - ranked[k])


@pytest.mark.parametrize("preset", ["tiny", "heads"])
@pytest.mark.parametrize("form", ["mlx", "published"])
def test_float32_layers(checkpoint: Callable[..., Path], preset: str, form: str) -> None:
    for trace, probe in steps(checkpoint(preset, form=form), "float32"):
        for layer, output in probe.output.items():
            if margin(trace, layer) > 1e-5:
                assert probe.chosen[layer] == set(trace[f"{layer}.chosen"].tolist())
                assert relative_rms(output, trace[f"{layer}.output"]) <= FLOAT32


@pytest.mark.parametrize("preset", ["tiny", "heads"])
@pytest.mark.parametrize("form", ["mlx", "published"])
def test_fast_layers_choose_the_same_experts(
    checkpoint: Callable[..., Path], preset: str, form: str
) -> None:
    sure = 0
    for trace, probe in steps(checkpoint(preset, form=form), "fast"):
        for layer, output in probe.output.items():
            if margin(trace, layer) <= SURE:
                continue
            sure += 1
            assert probe.chosen[layer] == set(trace[f"{layer}.chosen"].tolist())
            added = trace[f"{layer}.output"] - trace[f"{layer}.input"]
            assert relative_rms(output - trace[f"{layer}.input"], added) <= FAST_LAYER
    assert sure > 100


def test_observing_changes_nothing(tiny: lily.Model) -> None:
    seen: list[tuple[str, str]] = []

    def note(stage: str, kernel: str, slots: dict[str, Any], seconds: float | None) -> None:
        if seconds is not None:
            seen.append((stage, kernel))

    plain, watched = tiny.session(), tiny.session()
    plain.prefill(TOKENS[:20])
    watched.observe(TOKENS[:20], note, prefill=True)
    assert ("layer.0/delta", "prefill_delta_scan") in seen
    want = plain.decode(5)
    assert np.array_equal(np.asarray(watched.observe([5], note)), np.asarray(want))
    assert len([k for s, k in seen if not k.startswith("prefill")]) > 6 * 8
