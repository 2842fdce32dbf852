"""Fixtures that several folders of tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import lily
import random_checkpoint

settings.register_profile("lily", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("lily")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint("tiny", form="mlx") → folder, written once per test run."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def write(preset: str = "tiny", **options: object) -> Path:
        key = f"{preset}-{sorted(options.items())}"
        if key not in made:
            made[key] = random_checkpoint.write(
                root / str(len(made)),
                preset,
                **options,  # type: ignore[arg-type]
            )
        return made[key]

    return write


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    """The tiny checkpoint in float32, prefilled in chunks of 32; it keeps no states, so that no
    test lends another its own."""
    with lily.Model.load(
        checkpoint("tiny"), precision="float32", chunk=32, reuse_memory=0
    ) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_fast(checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    """The same in bf16."""
    with lily.Model.load(checkpoint("tiny"), chunk=32, reuse_memory=0) as model:
        yield model
