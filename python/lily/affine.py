"""Affine groups: 64 neighbouring weights become small codes with one scale and one bias.

    w ≈ s · c + b,   c in 0 … 2^bits − 1

A weight is bf16; so are scale and bias. bf16 arrays are held as their bit patterns in uint16.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 64

F32 = NDArray[np.float32]
Bf16 = NDArray[np.uint16]
Bytes = NDArray[np.uint8]

_LEAST_STEP: Final = np.float32(1e-7)  # MLX's; a group that spans less has all codes 0 or 1


def to_bf16(x: F32) -> Bf16:
    """Round to bf16, to nearest even; NaN is not handled."""
    u = x.view(np.uint32)
    rounded = u >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += u
    rounded >>= 16
    return rounded.astype("<u2")


def from_bf16(x: Bf16) -> F32:
    u = x.astype(np.uint32)
    u <<= 16
    return u.view(np.float32)


class Groups(NamedTuple):
    """Quantised rows.

    Attributes:
        codes: [N, K · bits / 8]; the words of an MLX weight as bytes, first code lowest.
        scales: [N, K / 64].
        biases: [N, K / 64].
    """

    codes: Bytes
    scales: Bf16
    biases: Bf16


class NotFiniteError(ValueError):
    """A group holds NaN or infinity, or spans more than float32 does."""


def quantize(weights: Bf16, bits: int) -> Groups:
    """Quantise rows, bit for bit as MLX does on a CPU.

    The extreme of larger magnitude becomes the bias, so it is kept exactly; the scale points from
    it to the other extreme and is adjusted so that zero is a code too. Codes are taken with the
    scale in float32, before it is rounded to bf16.

    Args:
        weights: [N, K], K a multiple of 64.
        bits: 4 or 8.

    Raises:
        NotFiniteError: see there.

    Source: MLX, `quantize` in mlx/backend/cpu/quantized.cpp.
    """
    n, k = weights.shape
    most = np.float32((1 << bits) - 1)
    # One column a group: minima, maxima and what follows then run along rows of vector lanes.
    w = from_bf16(np.ascontiguousarray(weights.reshape(-1, GROUP).T))
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = w.min(axis=0), w.max(axis=0)
        from_low = np.abs(low) > np.abs(high)
        step = np.maximum((high - low) / most, _LEAST_STEP)
        step = np.where(from_low, step, -step)
        edge = np.where(from_low, low, high)
        zero = np.rint(edge / step)  # minus this is the code of zero
        adjusted = zero != 0
        step = np.divide(edge, zero, out=step, where=adjusted)
        bias = np.where(adjusted, edge, np.float32(0))
    if not np.isfinite(step).all():
        raise NotFiniteError
    w -= bias
    w /= np.where(step == 0, np.float32(1), step)  # 0 in a constant group of huge values
    np.rint(w, out=w)
    np.clip(w, 0, most, out=w)
    codes: Bytes = w.astype(np.uint8)
    if bits == 4:
        codes = codes[0::2] | np.left_shift(codes[1::2], 4)
    return Groups(
        np.ascontiguousarray(codes.T).reshape(n, k * bits // 8),
        to_bf16(step).reshape(n, -1),
        to_bf16(bias).reshape(n, -1),
    )


def dequantize(groups: Groups, bits: int) -> F32:
    """float32 [N, K]: s · c + b, where only the sum is rounded.

    Args:
        groups: as `quantize` returns them.
        bits: 4 or 8.
    """
    codes = groups.codes
    if bits == 4:
        codes = np.empty((codes.shape[0], codes.shape[1] * 2), np.uint8)
        np.bitwise_and(groups.codes, 15, out=codes[:, 0::2])
        np.right_shift(groups.codes, 4, out=codes[:, 1::2])
    w = codes.astype(np.float32).reshape(*groups.scales.shape, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        w *= from_bf16(groups.scales)[..., None]
        w += from_bf16(groups.biases)[..., None]
    return w.reshape(codes.shape)
