"""The CPU device's packed form gives back what the checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
from harness import pack, random_segment
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_unpack_gives_the_checkpoints_values(bits: int) -> None:
    rng = np.random.default_rng(bits)
    weight = pack([random_segment(rng, bits, 35, 192)])
    assert np.array_equal(weight.packed.unpack(), weight.matrices[0])


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([4, 8, 16]), st.integers(1, 40), st.integers(1, 4)),
        min_size=1,
        max_size=6,
    ),
    experts=st.integers(1, 3),
    step=st.integers(1, 40),
    misalign=st.integers(0, 7),
)
def test_pieces_and_misaligned_sources_pack_to_the_same_bytes(
    shapes: list[tuple[int, int, int]], experts: int, step: int, misalign: int
) -> None:
    rng = np.random.default_rng(1)
    segments = [random_segment(rng, bits, rows, 64 * g, experts) for bits, rows, g in shapes]
    whole, pieces = pack(segments), pack(segments, step, misalign)
    assert whole.packed.bytes == pieces.packed.bytes
    for i, segment in enumerate(segments):
        for e in range(experts):
            assert np.array_equal(pieces.packed.unpack(e, i), segment.values[e])


@pytest.mark.parametrize(
    ("bits", "cols"),
    [(4, 96), (8, 32), (5, 64)],
)
def test_a_form_that_the_cpu_has_not_is_refused(bits: int, cols: int) -> None:
    rng = np.random.default_rng(0)
    segment = random_segment(rng, 16, 4, 64)
    segment.bits, segment.values = bits, segment.values[..., :cols].repeat(2, -1)[..., :cols]
    with pytest.raises(ValueError, match="expected"):
        pack([segment])
