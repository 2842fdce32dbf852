"""Distances between logits."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# float32 sums in another order; an error of the arithmetic shows as 1e-3 or more.
FLOAT32 = 1e-5
# bf16 activations: the median position, where no expert flips.
FAST_MEDIAN = 2e-2


def relative_rms(x: ArrayLike, want: ArrayLike) -> NDArray[np.float64]:
    """RMS of the difference over RMS of `want`, row by row."""
    a, b = np.asarray(x, np.float64), np.asarray(want, np.float64)
    return np.sqrt(np.mean((a - b) ** 2, -1) / np.mean(b**2, -1))


def bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
