"""The C++ core checks for itself: configurations and tensor tables that lie, past Python's checks.

LILY_FUZZ_CASES sets the number of cases, LILY_FUZZ_SEED the first seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lily
from lily import _core
from lily.checkpoint import Checkpoint, open_checkpoint
from lily.loading import _PLAIN, core_config

CASES = int(os.environ.get("LILY_FUZZ_CASES", "3000"))
FIRST_SEED = int(os.environ.get("LILY_FUZZ_SEED", "0"))
NO_IDS, NO_VALUES = np.empty(0, np.uint32), np.empty(0, np.float32)
ODD = [0, 1, 2, 3, 31, 32, 64, 65, 96, 128, 255, 256, 257, 4096, 2**16, 2**31 - 1, 2**32 - 1]


@pytest.fixture(scope="module")
def device() -> _core.Device:
    return _core.Device("cpu", 1)


def load(device: _core.Device, config: _core.Config, table: _core.TensorTable) -> _core.Engine:
    return _core.Engine.load(
        device, config, table, _core.Options("float32", chunk=16, memory_bytes=1 << 30), None
    )


def mutated_config(found: Checkpoint, rng: random.Random) -> _core.Config:
    config = core_config(found.config, found.config.vocab_size)
    for _ in range(rng.randint(0, 2)):
        name = rng.choice([*_PLAIN, "n_tokens", "full_attention"])
        if name == "full_attention":
            config.full_attention = [rng.random() < 0.5 for _ in range(rng.randint(0, 12))]
        elif name in ("rms_norm_eps", "rope_theta"):
            value = rng.choice([0.0, -1.0, 1e-6, 1e7, float("nan"), float("inf")])
            setattr(config, name, value)
        elif name == "tie_word_embeddings":
            config.tie_word_embeddings = True
        else:
            setattr(config, name, rng.choice(ODD))
    return config


def mutated_table(found: Checkpoint, rng: random.Random) -> _core.TensorTable:
    table = _core.TensorTable()
    table.files = [str(path) for path in found.files]
    table.published = rng.random() < 0.1
    victims = set(rng.sample(sorted(found.tensors), rng.randint(0, 2)))
    for name, e in found.tensors.items():
        file, offset, size, dtype, shape = e.file, e.offset, e.nbytes, e.dtype, list(e.shape)
        if name in victims:
            match rng.randrange(6):
                case 0:
                    file = rng.choice([1, 2**32 - 1])
                case 1:
                    offset = rng.choice([0, offset + 1, 2**63, 2**64 - 1, max(0, offset - 64)])
                case 2:
                    size = rng.choice([0, size - 1, size + 1, 2**64 - 1])
                case 3:
                    dtype = rng.choice(["U32", "BF16", "F16", "F32", "F8"])
                case 4:
                    shape = [rng.choice([0, 1, 64, 2**32, 2**63]) for _ in range(rng.randint(0, 4))]
                case 5:
                    continue
        table.add_tensor(name, file, offset, size, dtype, shape)
    for module, form in found.formats.items():
        bits = rng.choice([0, 3, 4, 8, 16]) if rng.random() < 0.01 else form.bits
        table.add_format(module, bits, form.group_size or 64)
    return table


def test_lies_past_python_are_typed_errors(
    device: _core.Device, checkpoint: Callable[..., Path]
) -> None:
    found = open_checkpoint(checkpoint("tiny"))
    refused = 0
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        rng = random.Random(seed)
        try:
            engine = load(device, mutated_config(found, rng), mutated_table(found, rng))
            session = _core.Session(engine, 40)
            session.prefill(np.arange(5, dtype=np.uint32), None)
            session.start(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, NO_IDS, NO_VALUES, 3)
            while session.next() is not None:
                pass
            session.stop()
        except (lily.Error, ValueError):
            refused += 1
    assert 0.2 * CASES < refused < CASES


def test_numbers_that_are_not_finite_raise(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A NaN scale deep inside gave an empty text instead of an error."""
    folder = tmp_path / "nan"
    shutil.copytree(checkpoint("tiny"), folder)
    entry = open_checkpoint(folder).tensors["layers.3.self_attn.o_proj.scales"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff\x7f" * (entry.nbytes // 2))
    with lily.Model.load(folder) as model:
        session = model.session()
        with pytest.raises(lily.DeviceError, match="not finite"):
            session.prefill([1, 2, 3])
        with pytest.raises(lily.DeviceError, match="lost"):
            session.prefill([1])
        session.reset()
        assert session.position == 0


def test_a_norm_that_is_not_finite_is_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "inf"
    shutil.copytree(checkpoint("tiny"), folder)
    entry = open_checkpoint(folder).tensors["norm.weight"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(entry.offset)
        file.write(b"\x80\x7f")
    with pytest.raises(lily.CheckpointError, match="norm.weight: value 0 is not finite"):
        lily.Model.load(folder)


def test_a_file_cut_after_it_was_checked_is_a_typed_error(
    device: _core.Device, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(checkpoint("tiny"), folder)
    found = open_checkpoint(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(found.tensors["norm.weight"].offset)
    from lily.loading import core_table

    with pytest.raises(lily.CheckpointError, match="expected inside"):
        load(device, core_config(found.config, 300), core_table(found))
