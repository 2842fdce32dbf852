"""What the prefill contracts say of products with weights, in float64; rows are tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from oracle import Array, f64, silu


def project(rows: ArrayLike, matrix: ArrayLike) -> Array:
    """Each row times the transposed matrix."""
    rows, matrix = f64(rows, matrix)
    result: Array = rows @ matrix.T
    return result


def gated(rows: ArrayLike, gate: ArrayLike, up: ArrayLike) -> Array:
    return silu(project(rows, gate)) * project(rows, up)


def experts_up(y: ArrayLike, offsets: Any, src: Any, gate: ArrayLike, up: ArrayLike) -> Array:
    """Grouped rows: offsets[e] … offsets[e + 1] - 1 belong to expert e."""
    y, gate, up = f64(y, gate, up)
    h = np.zeros((len(src), gate.shape[1]))
    for e in range(len(offsets) - 1):
        rows = slice(offsets[e], offsets[e + 1])
        h[rows] = gated(y[src[rows]], gate[e], up[e])
    return h


def experts_down(h: ArrayLike, offsets: Any, down: ArrayLike) -> Array:
    h, down = f64(h, down)
    out = np.zeros((len(h), down.shape[1]))
    for e in range(len(offsets) - 1):
        rows = slice(offsets[e], offsets[e + 1])
        out[rows] = project(h[rows], down[e])
    return out


def grouping(
    rng: np.random.Generator, counts: list[int], tokens: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Offsets and src for so many rows of each expert, of any tokens."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    return offsets, rng.integers(0, tokens, int(offsets[-1]), dtype=np.uint32)
