"""Numbers over long texts and large values.

With LILY_LONG=1 also a prompt of 150,000 tokens (some minutes).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lily
from lily.checkpoint import open_checkpoint
from model.compare import FAST_MEDIAN, relative_rms

TOKENS = np.random.default_rng(1).integers(0, 280, 2_050).tolist()


def test_a_state_carried_through_2000_steps_does_not_drift(
    checkpoint: Callable[..., Path], tiny: lily.Model
) -> None:
    """States and gates are float32: rounded to bf16 in each step, errors would add up."""
    with lily.Model.load(checkpoint("tiny"), threads=1, reuse_memory=0) as fast:
        stepped = fast.session()
        stepped.prefill(TOKENS[:50])
        rows = [np.asarray(stepped.decode(token)) for token in TOKENS[50:]]
    distance = relative_rms(np.stack(rows), tiny.session().score(TOKENS)[50:])
    parts = [np.median(part) for part in np.split(distance, 8)]
    assert max(parts) <= FAST_MEDIAN
    assert parts[-1] <= 1.5 * np.median(parts)


def test_logits_are_finite_after_any_number_of_tokens(
    tiny: lily.Model, tiny_fast: lily.Model
) -> None:
    """Row t is what a prompt of t + 1 tokens gives (test_exact.py)."""
    for model in (tiny, tiny_fast):
        assert np.isfinite(model.session().score(TOKENS[:1_100])).all()


@pytest.mark.parametrize("scale", [1 / 64, 64])
def test_experts_of_large_and_small_values_stay_near_float32(
    checkpoint: Callable[..., Path], tmp_path: Path, scale: float
) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(checkpoint("tiny"), folder)
    found = open_checkpoint(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        for name, entry in found.tensors.items():
            if ".down_proj." in name and not name.endswith(".weight"):  # scales and biases: bf16
                file.seek(entry.offset)
                wide = np.frombuffer(file.read(entry.nbytes), np.uint16).astype(np.uint32) << 16
                scaled = (wide.view(np.float32) * np.float32(scale)).view(np.uint32) >> 16
                file.seek(entry.offset)
                file.write(scaled.astype(np.uint16).tobytes())
    rows = []
    for precision in ("float32", "fast"):
        with lily.Model.load(folder, precision=precision) as model:
            rows.append(model.session().score(TOKENS[:200]))
    assert np.isfinite(rows[1]).all()
    assert np.median(relative_rms(rows[1], rows[0])) <= FAST_MEDIAN


@pytest.mark.skipif("LILY_LONG" not in os.environ, reason="LILY_LONG is not set")
def test_150000_tokens_leave_finite_numbers(checkpoint: Callable[..., Path]) -> None:
    tokens = np.random.default_rng(2).integers(0, 280, 150_000)
    with lily.Model.load(checkpoint("tiny"), context=150_100, reuse_memory=0) as model:
        session = model.session()
        assert np.isfinite(np.asarray(session.prefill(tokens))).all()
        assert np.isfinite(np.asarray(session.decode(7))).all()
        layers = model.info.config.layer_types.count("linear_attention")
        assert all(np.isfinite(session._live().state(layer)).all() for layer in range(layers))
