"""Leaving out what makes plans fast changes speed, not results."""

from __future__ import annotations

import pytest

import lily

GREEDY = lily.Sampling(temperature=0)
NAMES = (
    "register_scan",
    "chunked_prompts",
    "row_parallel",
    "token_handover",
    "concurrent_dispatch",
    "fused_gate_up",
    "fused_down",
    "fused_delta_norm",
)


def drawn(model: lily.Model, n: int) -> list[int]:
    session = model.session(context=n + 24)
    session.prefill([(i * 37 + 11) % 280 for i in range(n)])
    for _ in session.stream(16, GREEDY):
        pass
    return list(session.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_without(tiny: lily.Model, name: str) -> None:
    with tiny.without(name) as variant:
        assert variant.info.ablated == (name,)
        for n in (3, 70, 140):
            assert drawn(variant, n) == drawn(tiny, n)


def test_a_variant_outlives_its_model(checkpoint: object) -> None:
    model = lily.Model.load(checkpoint("tiny"), precision="float32")  # type: ignore[operator]
    variant = model.without("token_handover")
    expected = drawn(model, 5)
    model.close()
    assert drawn(variant, 5) == expected


def test_an_unknown_name_lists_the_known(tiny: lily.Model) -> None:
    with pytest.raises(ValueError, match="ablate: speed, expected some of dequantise_in_product"):
        tiny.without("speed")
