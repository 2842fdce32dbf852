"""What a plan says it will read of the weights is what the CPU kernels read.

LILY_BYTES_MODEL names another checkpoint to check, such as the `mid` preset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import lily


@pytest.mark.parametrize("n_prompt", [20, 200])
def test_declared_and_counted_weight_bytes_agree(
    checkpoint: Callable[..., Path], n_prompt: int
) -> None:
    folder = os.environ.get("LILY_BYTES_MODEL") or checkpoint("heads")
    with lily.Model.load(folder) as model:
        assert model._engine is not None
        assert model._device is not None
        declared = model._engine.plan_stats("next_greedy", n_prompt < 100, False)["weight_bytes"]
        session = model.session()
        session.prefill([7] * n_prompt)
        with session.stream(21, lily.Sampling.greedy(), stop_ids=()) as stream:
            next(stream)  # records the plans
            next(stream)
        before = model._device.weight_bytes_read
        rest = session.stream(11, lily.Sampling.greedy(), stop_ids=())
        tokens = [p for p in rest if p.token is not None]
        assert len(tokens) == 11
        read = model._device.weight_bytes_read - before
        # The pending token's step, a draw, and ten steps; a step reads the same whatever it does.
        assert read / 11 == pytest.approx(declared, rel=0.01)
