"""Whole kernels of the kind that lily has, against float64, plain and detecting, in every order."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from softmetal import toolchain
from softmetal.library import ORDERS, Array, Library, Order, update, write

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = Path(__file__).parent / "kernels"
MODES = ("plain", "detect")

# Largest error as a part of the largest output: float32 sums of some thousand terms; one rounding
# to the output's type.
TOLERANCE = {"float": 1e-5, "half": 2**-10, "bfloat": 2**-7}


@functools.cache
def _library(name: str, mode: str) -> Library:
    return Library.compile((KERNELS / f"{name}.metal").read_text(), mode=mode, name=f"{name}.metal")


def _typed(values: Array, dtype: str) -> tuple[Array, Array]:
    """Values as the kernel stores them, and as float64."""
    if dtype == "float":
        stored = values.astype(np.float32)
        return stored, stored.astype(np.float64)
    if dtype == "half":
        stored = values.astype(np.float16)
        return stored, stored.astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return stored, _wide(stored, dtype)


def _wide(stored: Array, dtype: str) -> Array:
    if dtype == "bfloat":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def _check(out: Array, expected: Array, dtype: str) -> None:
    error = np.abs(_wide(out, dtype) - expected).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float", "bfloat"])
def test_rms_norm(dtype: str, mode: str, order: Order) -> None:
    rng = np.random.default_rng(3)
    x, wide = _typed(rng.standard_normal((3, 520)), dtype)
    w, wide_w = _typed(rng.standard_normal(520), dtype)
    for weighted in (False, True):
        out = np.zeros_like(x)
        result = _library("rms_norm", mode).run(
            f"rms_norm_{dtype}", groups=3, threads=96, order=order,
            constants={"has_weight": weighted},
            buffers={0: np.uint32(520), 1: np.float32(1e-6), 2: x, 3: w, 4: write(out)},
        )  # fmt: skip
        assert not result.reports
        expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
        _check(out, expected * wide_w if weighted else expected, dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float", "bfloat"])
def test_row_product(dtype: str, mode: str, order: Order) -> None:
    K, N = 1024, 37  # the last threadgroup has rows that are not there
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 2**32, (N, K // 8), dtype=np.uint32)
    scales, wide_scales = _typed(rng.standard_normal((N, K // 64)), dtype)
    biases, wide_biases = _typed(rng.standard_normal((N, K // 64)), dtype)
    x, wide_x = _typed(rng.standard_normal(K), dtype)
    y = np.zeros(N, x.dtype)
    result = _library("row_product", mode).run(
        f"row_product_{dtype}", groups=5, threads=64, order=order,
        buffers={0: np.array([K, N], np.uint32), 1: codes, 2: scales, 3: biases, 4: x, 5: write(y)},
    )  # fmt: skip
    assert not result.reports
    nibbles = codes[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    weight = nibbles.reshape(N, K // 64, 64) * wide_scales[:, :, None] + wide_biases[:, :, None]
    _check(y, weight.reshape(N, K) @ wide_x, dtype)
    if mode == "detect":
        counts = result.counts
        assert counts[1].distinct_read == codes.nbytes
        assert counts[2].distinct_read == scales.nbytes
        assert counts[4].read == 10 * x.nbytes  # by each simdgroup
        assert (counts[5].written, counts[5].distinct_written) == (y.nbytes, y.nbytes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_histogram(mode: str, order: Order) -> None:
    values = np.random.default_rng(5).integers(0, 256, 5000).astype(np.uint8)
    counts, total = np.zeros(256, np.uint32), np.zeros(1, np.float32)
    result = _library("histogram", mode).run(
        "histogram", groups=3, threads=128, order=order, threadgroup={0: 128 * 4},
        buffers={0: np.uint32(5000), 1: values, 2: update(counts), 3: update(total)},
    )  # fmt: skip
    assert not result.reports
    np.testing.assert_array_equal(counts, np.bincount(values, minlength=256))
    assert total[0] == values.sum()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_matrix_product(dtype: str, mode: str, order: Order) -> None:
    M, N, K = 37, 50, 40
    rng = np.random.default_rng(6)
    a, wide_a = _typed(rng.standard_normal((M, K)), dtype)
    b, wide_b = _typed(rng.standard_normal((K, N)), dtype)
    c = np.zeros((M, N), a.dtype)
    result = _library("matrix_product", mode).run(
        f"matrix_product_{dtype}", groups=(2, 2), threads=128, order=order,
        buffers={0: np.array([M, N, K], np.int32), 1: a, 2: b, 3: write(c)},
    )  # fmt: skip
    assert not result.reports
    _check(c, wide_a @ wide_b, dtype)
