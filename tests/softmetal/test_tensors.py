"""Metal 4's tensor operations: right numbers, and what a kernel must not take for granted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softmetal import toolchain
from softmetal.build import CompileError, check
from softmetal.library import ORDERS, Library, Order, Result, write

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = Path(__file__).parent / "kernels"
SOURCE = (KERNELS / "tensor_product.metal").read_text()
LEFT, RIGHT = (np.random.default_rng(1).integers(-9, 10, (n, 64)) for n in (16, 32))


def bf16(values: Any) -> Any:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def run(library: Library, order: Order = "ahead", threads: int = 32) -> tuple[Result, bool]:
    """What it reports, and whether the numbers are right."""
    out = np.full((16, 32), np.nan, np.float32)
    buffers = {0: bf16(LEFT), 1: bf16(RIGHT), 2: write(out)}
    result = library.run("tensor_product", groups=1, threads=threads, buffers=buffers, order=order)
    return result, bool(np.array_equal(out, LEFT @ RIGHT.T))


def compiled(mode: str, bug: str = "") -> Library:
    defines = {bug: "1"} if bug else None
    return Library.compile(SOURCE, mode=mode, language="metal4.0", defines=defines)


@pytest.mark.parametrize("mode", ["plain", "detect"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_product(mode: str, order: Order) -> None:
    result, right = run(compiled(mode), order)
    assert not result.reports
    assert right


@pytest.mark.parametrize("bug", ["NOT_CLEARED", "OVERWRITES", "OWN_LAYOUT", "ROWS_FIRST"])
def test_a_bug_in_the_numbers(bug: str) -> None:
    _, right = run(compiled("plain", bug))
    assert not right


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bug", ["NO_BARRIER", "NO_BARRIER_BEHIND"])
def test_a_missing_barrier(bug: str, order: Order) -> None:
    result, _ = run(compiled("detect", bug), order)
    assert {r.kind for r in result.reports} & {"race", "uninitialised read"}


def test_an_element_that_stands_for_none_lies_outside() -> None:
    result, _ = run(compiled("detect", "EVERY_ELEMENT"))
    assert [r.kind for r in result.reports] == ["out of bounds"]


def test_a_part_of_a_simdgroup() -> None:
    result, _ = run(compiled("plain"), threads=16)
    assert "bad lane" in {r.kind for r in result.reports}


def run_edges(bug: str = "", order: Order = "ahead") -> tuple[Result, Any, Any]:
    """What it reports; of both products the numbers that are right, and those that are not NaN."""
    a, b = LEFT[:, :32], RIGHT[:, :32]
    expected = np.stack([a @ b.T, a[:, :21] @ b[:21]]).astype(np.float32)
    expected[0, :, 21:] = -1  # not written
    library = Library.compile(
        (KERNELS / "tensor_edges.metal").read_text(),
        mode="detect",
        language="metal4.0",
        defines={bug: "1"} if bug else None,
    )
    out = np.full((2, 16, 32), -1, np.float32)
    buffers = {0: bf16(a), 1: bf16(b), 2: write(out)}
    result = library.run("tensor_edges", groups=1, threads=32, buffers=buffers, order=order)
    return result, out == expected, ~np.isnan(out)


@pytest.mark.parametrize("order", ORDERS)
def test_operands_that_end(order: Order) -> None:
    result, right, _ = run_edges(order=order)
    assert not result.reports
    assert right.all()


def test_columns_that_are_not_there_are_nothing() -> None:
    _, _, number = run_edges("EVERY_COLUMN")
    assert number[1].all()
    assert np.array_equal(number[0].all(0), np.arange(32) < 21)


def test_terms_that_are_not_there_are_nothing() -> None:
    _, right, number = run_edges("TERMS_ARE_STATED")
    assert right[0].all()
    assert not number[1].any()


def test_an_end_behind_the_memory_is_out_of_bounds() -> None:
    result, _, _ = run_edges("ENDS_LATE")
    assert "out of bounds" in {r.kind for r in result.reports}


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (("RIGHT_TYPE", "half"), "both operands have one type"),
        (("M", "8"), "multiples of 16"),
        (("RIGHT_COLUMNS", "16"), "right operand is not of the descriptor's extents"),
    ],
)
def test_what_does_not_compile(define: tuple[str, str], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        check(SOURCE, language="metal4.0", defines=dict([define]))


def test_there_are_none_before_metal_4() -> None:
    with pytest.raises(CompileError, match="tensors come with Metal"):
        check(SOURCE)
