"""However a state was reached, it is the same state."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import lily
from model.compare import FLOAT32, relative_rms

RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 512, 400).tolist()


def whole_state(session: lily.Session) -> list[NDArray[np.float32]]:
    layers = session.model.info.config.layer_types.count("linear_attention")
    return [session._live().state(n) for n in range(layers)] + [
        session._live().conv(n) for n in range(layers)
    ]


def logits(session: lily.Session) -> NDArray[np.float32]:
    assert session.logits is not None
    return np.asarray(session.logits)


@pytest.fixture(scope="module")
def steps(tiny: lily.Model) -> list[tuple[NDArray[np.float32], list[NDArray[np.float32]]]]:
    """Logits and states after each of the first 131 tokens, one decode step at a time."""
    session = tiny.session()
    return [(np.asarray(session.decode(t)), whole_state(session)) for t in TOKENS[:131]]


@pytest.mark.parametrize("n", range(1, 131))
def test_prefill_equals_stepping(tiny: lily.Model, steps: list, n: int) -> None:
    session = tiny.session()
    got = np.asarray(session.prefill(TOKENS[:n]))
    want, states = steps[n - 1]
    assert relative_rms(got, want) <= FLOAT32
    for a, b in zip(whole_state(session), states, strict=True):
        assert relative_rms(a, b) <= FLOAT32


@pytest.mark.parametrize("precision", ["float32", "fast"])
@given(cuts=st.lists(st.integers(1, 399), max_size=6))
def test_a_prompt_cut_anywhere_gives_the_same_bits(
    tiny: lily.Model, tiny_fast: lily.Model, precision: str, cuts: list[int]
) -> None:
    model = tiny if precision == "float32" else tiny_fast
    whole, parts = model.session(), model.session()
    want = np.asarray(whole.prefill(TOKENS))
    edges = sorted({0, *cuts, len(TOKENS)})
    for a, b in pairwise(edges):
        parts.prefill(TOKENS[a:b])
    assert np.array_equal(logits(parts), want)
    for a, b in zip(whole_state(parts), whole_state(whole), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 128, 513])
@pytest.mark.parametrize("precision", ["float32", "fast"])
def test_the_chunk_size_changes_no_bit(
    checkpoint, tiny: lily.Model, tiny_fast: lily.Model, precision: str, chunk: int
) -> None:
    usual = tiny if precision == "float32" else tiny_fast
    want = np.asarray(usual.session().prefill(TOKENS))
    with lily.Model.load(checkpoint("tiny"), precision=precision, chunk=chunk) as model:
        assert np.array_equal(np.asarray(model.session().prefill(TOKENS)), want)


def test_scores_are_the_logits_of_each_prefix(tiny: lily.Model) -> None:
    scores = tiny.session().score(TOKENS[:70])
    for n in (1, 2, 31, 32, 33, 64, 70):
        want = np.asarray(tiny.session().prefill(TOKENS[:n]))
        assert relative_rms(scores[n - 1], want) <= FLOAT32


def test_feeding_onto_a_state(tiny: lily.Model) -> None:
    session = tiny.session()
    for a, b in ((0, 100), (100, 102), (102, 119)):
        session.prefill(TOKENS[a:b])
    assert np.array_equal(logits(session), np.asarray(tiny.session().prefill(TOKENS[:119])))


def continuation(session: lily.Session, n: int = 20) -> list[int]:
    stream = session.stream(n, lily.Sampling.greedy(), stop_ids=())
    for _ in stream:
        pass
    return stream.tokens


@pytest.mark.parametrize("n", [1, 31, 32, 33, 127, 128, 129, 250])
def test_snapshot_restore_fork_and_rewind_are_exact(tiny: lily.Model, n: int) -> None:
    session = tiny.session()
    session.prefill(TOKENS[:n])
    kept, want = session.snapshot(), logits(session)
    expected = continuation(session)

    session.prefill(TOKENS[n : n + 40])
    session.restore(kept)
    assert session.position == n
    assert np.array_equal(logits(session), want)
    assert continuation(session) == expected

    session.restore(kept)
    fork = session.fork()
    assert continuation(session) == expected
    assert continuation(fork) == expected
    fork.prefill(TOKENS[:5])
    session.restore(kept)
    assert continuation(session) == expected

    assert session.rewind(session.position) == n
    assert np.array_equal(logits(session), want)
    assert session.rewind(n - 1) == 0 if n > 1 else True
    other = tiny.session()
    other.restore(kept)
    assert continuation(other) == expected


def test_a_fork_is_not_disturbed_by_its_origin(tiny: lily.Model) -> None:
    """A shared cache row that the origin overwrote after a rewind changed the fork's text."""
    session = tiny.session()
    session.prefill(TOKENS[:50])
    start = session.snapshot()
    session.prefill(TOKENS[50:90])
    fork = session.fork()
    want = continuation(session.fork())
    session.restore(start)
    session.prefill(TOKENS[200:280])
    assert continuation(fork) == want


def test_reset_is_complete(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(TOKENS[100:300])
    continuation(session)
    session.reset()
    assert session.position == 0
    assert session.logits is None
    assert session.pending is None
    assert np.array_equal(
        np.asarray(session.prefill(TOKENS[:40])), np.asarray(tiny.session().prefill(TOKENS[:40]))
    )


def test_sessions_do_not_touch_each_other(tiny: lily.Model) -> None:
    a, b = tiny.session(), tiny.session()
    for i in range(0, 60, 10):
        a.prefill(TOKENS[i : i + 10])
        b.prefill(TOKENS[300 - i : 310 - i])
    assert np.array_equal(logits(a), np.asarray(tiny.session().prefill(TOKENS[:60])))


def test_more_rows_than_a_16_bit_index_holds(checkpoint) -> None:
    """16,384 tokens times two experts make 32,768 rows in one chunk."""
    tokens = np.random.default_rng(5).integers(0, 512, 16_384)
    with lily.Model.load(checkpoint("tiny"), chunk=16_384, context=16_500) as model:
        want = np.asarray(model.session().prefill(tokens))
    with lily.Model.load(checkpoint("tiny"), chunk=1_000, context=16_500) as model:
        assert np.array_equal(np.asarray(model.session().prefill(tokens)), want)
