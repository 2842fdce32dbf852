"""The embedding on the Metal device."""

from __future__ import annotations

import numpy as np
import pytest
from harness import metal_order, random_weight, run

from softmetal.library import ORDERS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [[4, 4], [8, 16], [16, 4]])
@pytest.mark.parametrize(("cols", "tokens"), [(128, [0, 49, 30, 31, 30]), (2048, [49])])
def test_embed(cols: int, tokens: list[int], bits: list[int], order: str) -> None:
    rng = np.random.default_rng(cols)
    w = random_weight(rng, [(31, cols), (19, cols)], bits)
    ids = np.array([7, *tokens], np.uint32)
    with metal_order(order):
        got = run("embed", {"D": cols}, {"rows": len(tokens), "first": 1}, isa="metal", tokens=ids,
                  weight=w, x=(len(tokens), cols))  # fmt: skip
    expected = w.matrix[tokens]
    if cols == 128 or 16 in bits:
        assert np.array_equal(got["x"], expected)
    got.expect("x", expected)
    read, _ = got.counts["tokens"]
    assert read == 4 * len(set(tokens)) or read == 4 * len(tokens)


def test_no_rows_touch_nothing() -> None:
    rng = np.random.default_rng(0)
    w = random_weight(rng, [(4, 128)])
    got = run("embed", {"D": 128}, {"rows": 0}, isa="metal", tokens=np.zeros(1, np.uint32),
              weight=w, x=(1, 128))  # fmt: skip
    assert np.isnan(got["x"]).all()
