"""A converted checkpoint computes what its weights, unpacked by hand, compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lily
from model.compare import FLOAT32, relative_rms
from reference.model import ReferenceModel

TOKENS = [3, 250, 17, 99, 4, 181, 77, 20, 5, 300, 41, 8]


@pytest.mark.parametrize(
    ("preset", "options"), [("heads", {}), ("tiny", {"tied": True, "nested": False})]
)
def test_logits_equal_those_of_the_unpacked_weights(
    preset: str, options: dict[str, bool], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(preset, form="published", **options)
    folder = lily.quantize(source, tmp_path / "out")
    reference = ReferenceModel(
        lily.unpack(folder, tmp_path / "unpacked", dtype="float32"), np.float32
    )
    want = np.stack([reference.step(token) for token in TOKENS])
    with lily.Model.load(folder, precision="float32") as model:
        assert model.info.form == "mlx"
        assert relative_rms(model.session().score(TOKENS), want).max() <= FLOAT32


def test_unpacked_bf16_loads(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Both roundings of the same weights: near each other, and far from another model's."""
    folder = checkpoint("heads", form="mlx")
    out = lily.unpack(folder, tmp_path / "out")
    logits = []
    for each in (folder, out):
        with lily.Model.load(each, precision="float32") as model:
            logits.append(model.session().score(TOKENS))
    # bf16 keeps 8 bits of a weight; a wrong layout would show as 1 or more.
    assert np.median(relative_rms(logits[1], logits[0])) <= 5e-2
