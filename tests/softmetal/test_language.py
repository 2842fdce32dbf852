"""The language and its functions compute what they should, plain and detecting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from softmetal import toolchain
from softmetal.library import ORDERS, Array, Library, Order, write

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = Path(__file__).parent / "kernels"
MODES = ("plain", "detect")


def _library(name: str, mode: str) -> Library:
    return Library.compile((KERNELS / f"{name}.metal").read_text(), mode=mode, name=name)


def _functions(v: Array) -> list[Array]:
    """What collectives.metal writes, row by row."""
    i = np.arange(32)
    quad = v.reshape(8, 4)

    def each(values: Array) -> Array:
        return np.repeat(values, 32 // len(values))

    inclusive, product = np.cumsum(v), np.cumprod(v)
    return [
        each(v.sum(keepdims=True)),
        each(v.prod(keepdims=True)),
        each(v.max(keepdims=True)),
        each(v.min(keepdims=True)),
        inclusive,
        inclusive - v,
        product,
        np.concatenate([[1], product[:-1]]),
        v[i * 7 % 32],
        v[i ^ 5],
        v[np.where(i >= 3, i - 3, i)],
        v[np.where(i + 3 < 32, i + 3, i)],
        v[(i - 3) % 32],
        v[(i + 3) % 32],
        each(v[9:10]),
        each(v[:1]),
        each(quad.sum(1)),
        each(quad.max(1)),
        each(quad.min(1)),
        v[i ^ 1],
        each(quad[:, 2]),
        v[np.where(i % 4 >= 1, i - 1, i)],
        v[np.where(i % 4 < 3, i + 1, i)],
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_collectives(mode: str, order: Order) -> None:
    library, rng = _library("collectives", mode), np.random.default_rng(1)
    for kernel, v in (
        ("integers", rng.choice([-1, 1, 2], 32).astype(np.int32)),
        ("floats", rng.choice([-1.0, 0.5, 2.0], 32).astype(np.float32)),
    ):
        expected = np.array(_functions(v), v.dtype)
        out = np.zeros_like(expected)
        result = library.run(
            kernel, groups=1, threads=32, buffers={0: v, 1: write(out)}, order=order
        )
        assert not result.reports
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("mode", MODES)
def test_votes_vectors_and_matrices(mode: str) -> None:
    library, rng = _library("collectives", mode), np.random.default_rng(2)

    v = rng.integers(-3, 4, 32).astype(np.int32)
    votes = np.zeros((3, 32), np.uint32)
    result = library.run("votes", groups=1, threads=32, buffers={0: v, 1: write(votes)})
    assert not result.reports
    assert (votes[0] == sum(1 << i for i in range(32) if v[i] > 0)).all()
    assert (votes[1] == 1 + 4 * (np.arange(32) == 0)).all()
    # 0 ^ 1 ^ … ^ 31 is 0
    assert (votes[2] == (int(np.bitwise_or.reduce(v.view(np.uint32))) + 7) % 2**32).all()

    x = rng.integers(-8, 8, (32, 4)).astype(np.float32)
    y = np.zeros_like(x)
    result = library.run("vectors", groups=1, threads=32, buffers={0: x, 1: write(y)})
    assert not result.reports
    np.testing.assert_array_equal(y, x[np.arange(32) ^ 1] + x.sum(0)[::-1])

    a, b = rng.integers(-4, 5, (2, 8, 8)).astype(np.float32)
    d = np.zeros_like(a)
    result = library.run("matrices", groups=1, threads=32, buffers={0: a, 1: b, 2: write(d)})
    assert not result.reports
    np.testing.assert_array_equal(d, 2 * a @ b.T + a)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimise", [0, 2])
def test_language(mode: str, optimise: int) -> None:
    source = (KERNELS / "language.metal").read_text()
    library = Library.compile(source, mode=mode, optimise=optimise)
    assert library.constants == {"switch_value": (7, "uint", 4), "is_on": (2, "bool", 1)}
    pair = np.array([7, np.float32(0.5).view(np.uint32)], np.uint32)
    for constants, (value, on) in (({}, (-1, 0)), ({"switch_value": 9, "is_on": True}, (9, 1))):
        out = np.zeros(17, np.float32)
        result = library.run(
            "language", groups=1, threads=(32, 2), constants=constants,
            buffers={0: pair, 1: write(out), 2: np.array([1, 2, 3, 4], np.uint8)},
        )  # fmt: skip
        reports = [r for r in result.reports if r.kind != "race"]  # two simdgroups write the same
        assert not reports
        expected = [2 + 2 + 9 + 16, 127, 7.5, 6, 7, 3, 1, 2.25, 4, 4 + 31 + 3 + 3, 3 + 2 + 3 + 10,
                    8 + 0.5 - 2 + 2, 1, value, on, 1.5, 0]  # fmt: skip
        np.testing.assert_array_equal(out, np.array(expected, np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_positions(mode: str) -> None:
    groups, threads = (2, 3, 2), (10, 3, 2)
    grid = np.multiply(groups, threads)
    out = np.zeros((*grid[::-1], 24), np.uint32)
    result = _library("language", mode).run(
        "positions", groups=groups, threads=threads, buffers={0: write(out)}
    )
    assert not result.reports
    for z, y, x in np.ndindex(*grid[::-1]):
        place = np.array([x, y, z])
        group, within = place // threads, place % threads
        index = within[0] + 10 * (within[1] + 3 * within[2])
        vectors = [*place, *grid, *within, *threads, *group, *groups]
        numbers = [index, index % 32, index // 32, 2, 32, index % 4]
        np.testing.assert_array_equal(out[z, y, x], [*vectors, *numbers])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_largest_threadgroup(mode: str, order: Order) -> None:
    out = np.zeros(1024, np.uint32)
    result = _library("language", mode).run(
        "reverse", groups=1, threads=1024, buffers={0: write(out)}, order=order
    )
    assert not result.reports
    np.testing.assert_array_equal(out, np.arange(1024)[::-1])
