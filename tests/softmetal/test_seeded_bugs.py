"""Every seeded bug is reported, with its kind and its line; correct kernels stay silent."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softmetal import toolchain
from softmetal.library import ORDERS, Library, Order, Result, read, update
from softmetal.mutations import without_each_barrier

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = Path(__file__).parent / "kernels"
SOURCE = (KERNELS / "seeded_bugs.metal").read_text()


def _expected() -> dict[str, set[tuple[str, int]]]:
    """Kernel → the (kind, line) pairs of which a report has to name one."""
    expected: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for number, line in enumerate(SOURCE.splitlines(), 1):
        if found := re.search(r"// BUG (\w+): (.*)", line):
            expected[found[1]] |= {(kind.strip(), number) for kind in found[2].split("|")}
    return expected


EXPECTED = _expected()


@functools.cache
def _library(optimise: int) -> Library:
    return Library.compile(SOURCE, mode="detect", name="seeded_bugs.metal", optimise=optimise)


def _run(kernel: str, order: Order, optimise: int, seed: int = 0) -> Result:
    buffers = {
        0: update(np.zeros(128, np.float32)),
        1: read(np.arange(128, dtype=np.float32)),
    }
    return _library(optimise).run(
        kernel, groups=2, threads=64, buffers=buffers, order=order, seed=seed
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("optimise", [0, 1, 2])
def test_bugs_are_reported_and_controls_are_silent(optimise: int, order: Order) -> None:
    wrong = []
    for kernel in _library(optimise).kernels:
        for seed in range(3 if order in {"random", "ahead"} else 1):
            reports = _run(kernel, order, optimise, seed).reports
            said = {(r.kind, r.line) for r in reports}
            if bool(reports) != bool(EXPECTED[kernel]) or (reports and not said & EXPECTED[kernel]):
                wrong.append((kernel, seed, [str(r) for r in reports]))
    assert not wrong


def test_there_are_bugs_and_controls() -> None:
    kernels = set(_library(2).kernels)
    bugs = {name for name, places in EXPECTED.items() if places}
    assert bugs <= kernels
    assert len(bugs) >= 20
    assert len(kernels - bugs) == SOURCE.count("// CONTROL")


def test_a_report_names_both_sides_of_a_race() -> None:
    (report,) = _run("barrier_without_memory", "in_turn", 2).reports
    line = next(n for n, s in enumerate(SOURCE.splitlines(), 1) if "BUG barrier_without" in s)
    assert (report.kind, report.file, report.line) == ("race", "seeded_bugs.metal", line)
    assert report.other_line == line - 2
    assert report.lane + report.other_lane == 63
    assert "threadgroup shared byte" in report.text


def _small_dispatch(name: str) -> dict[str, Any]:
    x = np.ones((32, 64), np.float32)
    dispatches: dict[str, dict[str, Any]] = {
        "rms_norm": {
            "kernel": "rms_norm_float",
            "groups": 2,
            "threads": 64,
            "buffers": {0: np.uint32(1024), 1: np.float32(0), 2: x, 3: x, 4: update(x.copy())},
        },
        "matrix_product": {
            "kernel": "matrix_product_float",
            "groups": 1,
            "threads": 128,
            "buffers": {
                0: np.array([32, 32, 64], np.int32),
                1: x,
                2: np.ascontiguousarray(x.T),
                3: update(np.zeros((32, 32), np.float32)),
            },
        },
        "histogram": {
            "kernel": "histogram",
            "groups": 2,
            "threads": 128,
            "threadgroup": {0: 512},
            "buffers": {
                0: np.uint32(1000),
                1: np.zeros(1000, np.uint8),
                2: update(np.zeros(256, np.uint32)),
                3: update(np.zeros(1, np.float32)),
            },
        },
    }
    return dispatches[name]


@pytest.mark.parametrize("name", ["rms_norm", "matrix_product", "histogram"])
def test_every_barrier_of_a_real_kernel_is_missed(name: str) -> None:
    """Without it there is a report, in every order; in many orders the numbers stay right."""
    source = (KERNELS / f"{name}.metal").read_text()
    whole = Library.compile(source, mode="detect").run(**_small_dispatch(name))
    assert not whole.reports
    mutants = list(without_each_barrier(source))
    assert len(mutants) == {"rms_norm": 1, "matrix_product": 3, "histogram": 3}[name]
    for line, mutant in mutants:
        library = Library.compile(mutant, mode="detect")
        for order in ORDERS:
            reports = library.run(**_small_dispatch(name), order=order).reports
            assert "race" in {r.kind for r in reports}, (line, order)
