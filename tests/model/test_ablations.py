"""Leaving out what makes plans fast changes speed, not results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import CONTRACTS, SOFTMETAL, metal_missing, relative_rms

import lily
from lily import _testing

GREEDY = lily.Sampling(temperature=0)
ROUNDS = "dequantise_in_product"  # weights to bf16, which no other does
NAMES = (
    "gpu_routing",
    "register_scan",
    "chunked_prompts",
    "row_parallel",
    "token_handover",
    "concurrent_dispatch",
    "fused_gate_up",
    "fused_down",
    "fused_qk_prep",
    "fused_delta_norm",
    "tile_rows_by_load",
    "last_layer_skip",
    "coalesced_kv",
    "gqa_packing",
    "split_kv",
)
ON_METAL = (
    "gpu_routing",
    "register_scan",
    "row_parallel",
    "fused_gate_up",
    "fused_down",
    "fused_qk_prep",
    "fused_delta_norm",
)


def prompt(n: int) -> list[int]:
    return [(i * 37 + 11) % 280 for i in range(n)]


def drawn(model: lily.Model, n: int, count: int = 16) -> list[int]:
    session = model.session(context=n + count + 8)
    session.prefill(prompt(n))
    for _ in session.stream(count, GREEDY):
        pass
    return list(session.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_without(tiny: lily.Model, name: str) -> None:
    with tiny.without(name) as variant:
        assert variant.info.ablated == (name,)
        for n in (3, 70, 140):
            assert drawn(variant, n) == drawn(tiny, n)


def test_all_at_once(tiny: lily.Model) -> None:
    with tiny.without(*NAMES) as variant:
        assert drawn(variant, 70) == drawn(tiny, 70)


def test_rounded_weights_are_near(tiny: lily.Model) -> None:
    with tiny.without(ROUNDS) as variant:
        expected = np.asarray(tiny.session().prefill(prompt(70)))
        found = np.asarray(variant.session().prefill(prompt(70)))
        # bf16 rounds a weight by 2^-9 / sqrt(3) = 1.1e-3 of it, and so each product; six a layer
        # add up at random to 5e-3 in four layers and 8e-3 in eight.
        assert 0 < relative_rms(found, expected) < 2e-2


MISSING = next((reason for op in CONTRACTS if (reason := metal_missing(op))), None)


@pytest.fixture(scope="module")
def tiny_on_metal(checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    if SOFTMETAL:
        _testing.fake_set("mode", "plain")
    with lily.Model.load(
        checkpoint("tiny"), device="metal", precision="float32", chunk=32
    ) as model:
        yield model
    if SOFTMETAL:
        _testing.fake_set("mode", None)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("name", [*ON_METAL, ROUNDS])
def test_tokens_on_metal(tiny: lily.Model, tiny_on_metal: lily.Model, name: str) -> None:
    with tiny_on_metal.without(name) as variant, tiny.without(name) as same:
        assert drawn(variant, 37, 4) == drawn(same, 37, 4)
    if SOFTMETAL:
        reports = _testing.fake_reports()
        assert not reports, "\n".join(reports)


def test_a_variant_outlives_its_model(checkpoint: Callable[..., Path]) -> None:
    model = lily.Model.load(checkpoint("tiny"), precision="float32")
    variant = model.without("token_handover")
    expected = drawn(model, 5)
    model.close()
    assert drawn(variant, 5) == expected


def test_an_unknown_name_lists_the_known(tiny: lily.Model) -> None:
    with pytest.raises(ValueError, match="ablate: speed, expected some of dequantise_in_product"):
        tiny.without("speed")
