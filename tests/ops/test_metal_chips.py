"""What differs from chip to chip. Products of tiles and attention on Metal 4's tensor operations,
which an M5 uses: against the same oracles, the detector silent in every order; and the kernels that
take over where they do not work. Half instead of bf16 on an M1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_metal_prefill as base
from harness import (
    SOFTMETAL,
    metal_missing,
    normals,
    random_weight,
    relative_rms,
    rounded,
    to_int8,
)
from metal_cases import Case, check, dispatch, flattened, run_source
from test_metal_prefill import dense, experts_down, experts_up, generator, same_bits

from lily import _testing
from softmetal.mutations import without_each_barrier

MISSING = metal_missing() or (None if SOFTMETAL else "only the software Metal can be any chip")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.mark.parametrize(
    ("name", "i", "rows"), [(n, 0, 33) for n in base.DENSE] + [("route", 2, 70)]
)
def test_dense_products(name: str, i: int, rows: int) -> None:
    check(dense(name, i, rows, "fast"), isa="metal tensor")


@pytest.mark.parametrize(
    ("counts", "tile_rows"), [([3] * 9, 16), ([0, 70, 1], 32), ([64, 0, 65], 64)]
)
def test_experts(counts: list[int], tile_rows: int) -> None:
    check(experts_up("fast", counts, 64, 40, [4, 8], tile_rows=tile_rows), isa="metal tensor")
    check(experts_down("fast", counts, 64, 128, 70, tile_rows=tile_rows), isa="metal tensor")


def test_no_rows() -> None:
    w = random_weight(generator(1), [(8, 64)])
    check(base.project_add(np.zeros((0, 64), np.float32), w, "fast"), isa="metal tensor")


@pytest.mark.parametrize("bits", base.LONG_SUMS)
def test_long_sums_of_normed_rows_are_those_of_the_base(bits: int) -> None:
    rng = generator(3)
    w = random_weight(rng, [(33, 4096)], bits)
    case = base.head(rounded(normals(rng, 40, 4096), "fast"), w, "fast")
    got = dispatch(case, "metal plain tensor")["logits"]
    assert relative_rms(got, case.expected["logits"][0]) < base.LONG_SUMS[bits]


def test_long_sums_of_other_rows_round_their_weights() -> None:
    # To bf16: 2^-9 at most, about 1e-3 on average, of each term. Less than 5e-4 would be another
    # kernel.
    rng = generator(3)
    w = random_weight(rng, [(33, 4096)], 4)
    case = base.project_add(rounded(normals(rng, 40, 4096), "fast"), w, "fast")
    expected = case.expected["x"][0] - case.slots["x"]
    case.slots["x"] = np.zeros_like(case.slots["x"])
    got = dispatch(case, "metal plain tensor")["x"]
    assert 5e-4 < relative_rms(got, expected) < 2e-3


ATTEND_SHAPES = [
    (3, 17, (16, 2, 256)),  # the released model's heads
    (35, 2, (2, 2, 64)),  # two blocks of rows
    (5, 130, (4, 1, 64)),  # three tiles of keys, the last a few
    (2, 62, (8, 1, 128)),  # ends with a tile
]


def attend(rows: int, position: int, shape: tuple[int, int, int], **constants: int) -> Case:
    inputs = base.attend_inputs(generator(rows, position), "fast", rows, position, shape)
    return base.attend("fast", inputs, position, shape, **constants)


@pytest.mark.parametrize(("rows", "position", "shape"), ATTEND_SHAPES)
def test_attention(rows: int, position: int, shape: tuple[int, int, int]) -> None:
    # Memory behind the last row is poison.
    case = attend(rows, position, shape)
    got = check(case, isa="metal tensor")["u"]
    assert relative_rms(got, case.expected["u"][0]) < base.ATTEND_TOLERANCE["fast"]


def test_attention_rounds_its_probabilities() -> None:
    # To bf16, as outputs are rounded afterwards. Bits as the base kernel's would be another kernel.
    case = attend(5, 130, (4, 1, 64))
    exact = case.expected["u"][0]
    found, others = (dispatch(case, isa)["u"] for isa in ("metal plain tensor", "metal plain"))
    assert 1.05 < relative_rms(found, exact) / relative_rms(others, exact) < 1.5


def test_attention_that_is_rescaled_in_every_tile() -> None:
    inputs = base.attend_inputs(generator(8), "fast", 3, 200, (4, 1, 64))
    inputs["q"][:, :, 0] = 1
    inputs["keys"][0, :, 0] = np.arange(inputs["keys"].shape[1])
    check(base.attend("fast", inputs, 200, (4, 1, 64)), isa="metal tensor")


def test_attention_with_heads_apart() -> None:
    check(attend(35, 2, (6, 2, 64), APART=1), isa="metal tensor")


def test_scores_beyond_any_step_and_nans() -> None:
    inputs = base.attend_inputs(generator(2), "fast", 4, 70, (2, 1, 64))
    inputs["q"][1] *= 1e6
    inputs["q"][2, 0] = np.nan
    case = base.attend("fast", inputs, 70, (2, 1, 64))
    case.expected.clear()
    got, usual = (dispatch(case, isa)["u"] for isa in ("metal tensor", "metal"))
    assert np.isnan(got[2, 0]).all()
    assert not np.isnan(np.delete(got, 2, 0)).any()
    assert not np.isnan(got[2, 1]).any()
    assert relative_rms(np.delete(got, 2, 0), np.delete(usual, 2, 0)) < 4e-3


@pytest.mark.parametrize("shape", [(3, 1, 96), (1, 1, 32)])
def test_heads_without_whole_pieces_keep_the_base_kernel(shape: tuple[int, int, int]) -> None:
    case = attend(7, 31, shape)
    assert same_bits(dispatch(case, "metal plain tensor")["u"], dispatch(case, "metal plain")["u"])


def test_an_int8_cache_keeps_the_base_kernel() -> None:
    shape = (4, 1, 64)
    case = attend(9, 15, shape, KV_INT8=1)
    for name in ("keys", "values"):
        case.slots[name] = to_int8(np.nan_to_num(case.slots[name]))
    assert same_bits(dispatch(case, "metal plain tensor")["u"], dispatch(case, "metal plain")["u"])


def test_float32_stays_float32() -> None:
    case = dense("head", 0, 33, "float32")
    assert same_bits(dispatch(case, "metal plain tensor")["logits"], dispatch(case)["logits"])


def rising_scores() -> Case:
    """The base kernel's case, over two tiles of keys."""
    inputs = base.attend_inputs(generator(8), "fast", 3, 70, (4, 1, 64))
    inputs["q"][:, :, 0] = 1
    inputs["keys"][0, :, 0] = np.arange(inputs["keys"].shape[1]) * 4
    return base.attend("fast", inputs, 70, (4, 1, 64))


# How many barriers, and how many of another kernel follow; a case, threadgroups.
BARRIERS: dict[str, tuple[int, int, Callable[[], Case], tuple[int, ...]]] = {
    "dense": (4, 0, lambda: dense("project_add", 0, 33, "fast"), (1, 2)),
    "grouped": (5, 0, lambda: experts_up("fast", [3, 66, 5], 128, 40, 4, tile_rows=64), (2, 2)),
    "attention": (7, 10, rising_scores, (1, 1)),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_each_barrier_is_missed(name: str) -> None:
    count, others, make, groups = BARRIERS[name]
    case = make()
    whole = flattened(f"{case.op}.metal")
    assert not run_source(case, whole, groups, 128, tensors=True)[0]
    mutants = list(without_each_barrier(whole))
    assert len(mutants) == count + others
    del mutants[count:]
    silent = [n for n, m in mutants if not run_source(case, m, groups, 128, tensors=True)[0]]
    assert not silent


@pytest.mark.parametrize("what", ["fail_library", "fail_pipeline"])
def test_a_kernel_that_fails_gives_way_to_the_base(what: str, capfd: Any) -> None:
    case = dense("head", 0, 33, "fast")
    _testing.fake_set(what, "2")  # the first is the probe's
    got = dispatch(case, f"metal plain tensor, {what}")["logits"]
    _testing.fake_set(what, None)
    said = capfd.readouterr().err
    assert "on tensor operations, metal: kernel prefill_head" in said
    assert "made to fail" in said
    assert same_bits(got, dispatch(case)["logits"])


@pytest.mark.parametrize("rows", [3, 40])
def test_attention_on_m1_stages_half(rows: int) -> None:
    # Values beyond half's range tell: 65504 is what half makes of them.
    shape = (4, 1, 64)
    inputs = base.attend_inputs(generator(rows), "fast", rows, 5, shape)
    inputs["values"][:, 0] = rounded(np.array(3e5), "fast")
    case = base.attend("fast", inputs, 5, shape)
    m3 = dispatch(case, "metal plain")["u"]
    case.slots["values"] = inputs["values"].copy()
    inputs["values"][:, 0] = 65504
    case.expected = base.attend("fast", inputs, 5, shape).expected
    m1 = check(case, ["ahead"], "metal m1")["u"]
    assert np.abs(m3).max() > 2 * np.abs(m1).max()
