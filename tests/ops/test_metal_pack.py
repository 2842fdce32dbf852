"""The Metal device's packed form: parts of equal width, where the kernels look for them."""

from __future__ import annotations

import numpy as np
import pytest
from harness import pack, random_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from lily import _testing

pytestmark = pytest.mark.skipif(
    not hasattr(_testing, "has_metal_kernel"), reason="the Metal device is not in this build"
)

ALIGNMENT = 256


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def test_two_segments_of_one_width_are_one_part() -> None:
    rng = np.random.default_rng(4)
    segments = [random_segment(rng, 4, 3, 128), random_segment(rng, 4, 5, 128)]
    packed = pack(segments).on("metal").bytes
    codes = b"".join(s.weight.tobytes() for s in segments)
    pairs = []
    for s in segments:
        assert s.scales is not None and s.biases is not None
        pairs.append(np.stack([s.scales[0], s.biases[0]], axis=-1))  # the scale in the low half
    affine = np.concatenate(pairs).astype(np.uint16).tobytes()
    assert len(packed) == aligned(len(codes)) + aligned(len(affine))
    assert packed[: len(codes)] == codes
    assert packed[aligned(len(codes)) :][: len(affine)] == affine


def test_experts_and_parts_begin_at_multiples_of_256() -> None:
    rng = np.random.default_rng(5)
    segments = [random_segment(rng, bits, 3, 64, experts=2) for bits in (8, 16, 4)]
    packed = pack(segments).on("metal").bytes
    expert = aligned(3 * 64) + 256 + aligned(3 * 128) + aligned(3 * 32) + 256
    assert len(packed) == 2 * expert
    for e in range(2):
        at = e * expert
        for s, affine in zip(segments, (256, 0, 256), strict=True):
            codes = s.weight[e].tobytes()
            assert packed[at : at + len(codes)] == codes
            at += aligned(len(codes)) + affine


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([4, 8, 16]), st.integers(1, 40)), min_size=1, max_size=6
    ),
    groups=st.integers(1, 4),
    experts=st.integers(1, 3),
    step=st.integers(1, 40),
    misalign=st.integers(0, 7),
)
def test_unpack_gives_the_checkpoints_values(
    shapes: list[tuple[int, int]], groups: int, experts: int, step: int, misalign: int
) -> None:
    rng = np.random.default_rng(1)
    segments = [random_segment(rng, bits, rows, 64 * groups, experts) for bits, rows in shapes]
    whole = pack(segments).on("metal")
    pieces = pack(segments, step, misalign).on("metal")
    assert whole.bytes == pieces.bytes
    for i, segment in enumerate(segments):
        for e in range(experts):
            assert np.array_equal(pieces.unpack(e, i), segment.values[e])


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ([(5, 4, 64)], "4, 8 or 16 bits"),
        ([(4, 4, 96)], "a multiple of 64 columns"),
        ([(8, 4, 64), (8, 4, 128)], "64 columns like the first"),
    ],
)
def test_a_form_that_metal_has_not_is_refused(
    shapes: list[tuple[int, int, int]], what: str
) -> None:
    segments = [
        (bits, rows, cols, np.zeros((1, rows, cols), np.uint8), None, None)
        for bits, rows, cols in shapes
    ]
    with pytest.raises(ValueError, match=f"metal: weight segment .* expected {what}"):
        _testing.pack(segments, isa="metal")
    with pytest.raises(ValueError, match="0 segments"):
        _testing.pack([], isa="metal")
