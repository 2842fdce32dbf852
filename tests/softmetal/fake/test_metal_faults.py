"""The tiny model while Metal fails, at each allocation and at each command buffer in turn.

Kernels run in the emulator, in float32. What fails is a typed error; a session that lost its state
says so until it is restored; and the same call, made again, gives what it always gave.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CONTRACTS, SOFTMETAL, metal_missing

import lily
from lily import _testing

MISSING = next((reason for op in CONTRACTS if (reason := metal_missing(op))), None)
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal fails when told to"),
]

PROMPT = [11, 48, 85, 5, 6]
GREEDY = lily.Sampling(temperature=0)
DRAWN = lily.Sampling(temperature=0.9, repetition_penalty=1.2, logit_bias={7: 1.0, 9: 0.5}, seed=3)

NO_MEMORY = re.compile(r"metal: cannot allocate \d+ bytes for [a-z][a-z0-9 .-]+")
FAILED = re.compile(
    # "embed: embed", or "layer.0/delta: delta_project"
    r"metal: command buffer of \d+ dispatch(?:es)? \((\w[\w./]*: \w+)(?: to \w[\w./]*: \w+)?\)"
    r" failed: made to fail \(MTLCommandBufferErrorDomain 2\)"
)

Do = Callable[[lily.Session | None, Callable[[], Any]], Any]
"""Makes one call, on a session if there is one, and returns what it returns."""


@pytest.fixture(autouse=True)
def no_reports() -> Iterator[None]:
    """On the way out of a failure, the host makes no mistake that the software Metal sees."""
    yield
    for setting in ("mode", "fail_allocation", "fail_command_buffer"):
        _testing.fake_set(setting, None)
    reports = _testing.fake_reports()
    assert not reports, "\n".join(reports)


def load(folder: Path) -> lily.Model:
    _testing.fake_set("mode", "plain")
    return lily.Model.load(folder, device="metal", precision="float32", chunk=4)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    with load(checkpoint("tiny")) as model:
        yield model


def buffers() -> int:
    gc.collect()
    return _testing.fake_number("buffers")


def call(_: lily.Session | None, f: Callable[[], Any]) -> Any:
    return f()


def draw(session: lily.Session, sampling: lily.Sampling, do: Do) -> list[int]:
    stream = do(session, lambda: session.stream(3, sampling, stop_ids=()))
    return [do(session, lambda: next(stream)).token for _ in range(3)]


def work(model: lily.Model, do: Do, streams: Callable[[Do, Any, Any], Any]) -> list[Any]:
    """What a model can do: the numbers that it leaves. The prompt is two chunks."""
    session = do(None, lambda: model.session(context=40))
    numbers = [np.array(do(session, lambda: session.prefill(PROMPT)))]
    numbers += [np.array(do(session, lambda: session.decode(3)))]
    kept = do(session, session.snapshot)
    numbers += [streams(do, session, GREEDY)]
    do(session, lambda: session.restore(kept))
    numbers += [streams(do, session, DRAWN)]
    # The pending token first, in a decode step.
    numbers += [np.array(do(session, lambda: session.score([8, 9])))]
    other = do(session, session.fork)
    numbers += [np.array(do(s, lambda s=s: s.decode(4))) for s in (session, other)]
    return numbers


def by_token(do: Do, session: lily.Session, sampling: lily.Sampling) -> list[int]:
    return draw(session, sampling, do)


def as_a_whole(do: Do, session: lily.Session, sampling: lily.Sampling) -> Any:
    return do(session, lambda: draw(session, sampling, call))


@pytest.fixture(scope="module")
def expected(model: lily.Model) -> list[Any]:
    """What the work leaves when nothing fails."""
    return work(model, call, by_token)


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def test_loading_survives_every_failed_allocation(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("tiny")
    load(folder).close()  # compiles
    before = buffers(), _testing.fake_number("objects")
    for n in count(1):
        _testing.fake_set("fail_allocation", str(n))
        try:
            load(folder).close()
        except lily.Error as error:
            assert NO_MEMORY.fullmatch(str(error))
        else:
            break
        assert (buffers(), _testing.fake_number("objects")) == before
    assert n > 5


def test_a_call_without_memory_changes_nothing(model: lily.Model, expected: list[Any]) -> None:
    refused = set()

    def do(session: lily.Session | None, f: Callable[[], Any]) -> Any:
        state = session and (session.position, session.tokens, session.pending)
        n = 1
        while True:
            before = buffers()
            _testing.fake_set("fail_allocation", str(n))
            try:
                return f()
            except lily.DeviceError as error:
                assert NO_MEMORY.fullmatch(str(error))
                refused.add(str(error))
            finally:
                _testing.fake_set("fail_allocation", None)
            assert state == (session and (session.position, session.tokens, session.pending))
            # What was kept, such as a plan, is not asked for again.
            n += 1 - (buffers() - before)

    before = buffers()
    with model.without() as fresh:  # with plans of its own, and their temporaries
        assert same(work(fresh, do, by_token), expected)
    assert buffers() == before
    assert len(refused) > 12


REFUSED: list[Callable[[lily.Session], Any]] = [
    lambda s: s.prefill([1]),
    lambda s: s.decode(1),
    lambda s: s.score([1]),
    lambda s: s.stream(1, GREEDY),
    lambda s: s.snapshot(),
    lambda s: s.fork(),
    lambda s: s.discard_pending(),
]
"""What a session without its state does not do."""


def test_every_failed_command_buffer_is_told_and_survived(
    model: lily.Model, expected: list[Any]
) -> None:
    failed: list[str] = []
    before = buffers()
    bystander: Any = model.session(context=10)
    bystander.prefill(PROMPT)
    there: Any = bystander.snapshot()
    its_logits = np.array(bystander.decode(1))

    def do(session: lily.Session | None, f: Callable[[], Any]) -> Any:
        if session is None:
            return f()
        kept = session.snapshot()
        for n in count(1):
            _testing.fake_set("fail_command_buffer", f"{n}:2")
            try:
                return f()
            except lily.DeviceError as error:
                told = FAILED.fullmatch(str(error))
                assert told, error
                failed.append(told[1])
            finally:
                _testing.fake_set("fail_command_buffer", None)
            for refused in REFUSED:
                with pytest.raises(lily.DeviceError, match="the session's state was lost"):
                    refused(session)
            bystander.restore(there)
            assert np.array_equal(bystander.decode(1), its_logits)
            session.restore(kept)
        return None

    assert same(work(model, do, as_a_whole), expected)
    # Two chunks, a step, two streams of a draw and two steps, a step and a chunk, two steps.
    assert len(failed) == 2 + 1 + 2 * 3 + 2 + 2
    assert set(failed) == {"embed: embed", "layer.0/delta: delta_project", "sample: sample"}
    bystander.close()
    bystander = there = None
    assert buffers() == before


def test_a_pending_token_beside_a_snapshot_moves_no_cache(model: lily.Model) -> None:
    session = model.session(context=20)
    session.prefill(PROMPT)
    calls: list[Callable[[], Any]] = [
        lambda: session.decode(3),
        lambda: session.score([3]),
        lambda: next(session.stream(1, GREEDY, stop_ids=())),
    ]
    for call in calls:
        call()  # its plans, and what it keeps
    kept = session.snapshot()  # shares the cache
    for call in calls:
        session.discard_pending()
        session.prefill([7])
        next(session.stream(1, GREEDY, stop_ids=()))  # is pending
        before = _testing.fake_number("allocations")
        call()
        assert _testing.fake_number("allocations") == before
    assert kept.position == 7


def test_a_stream_that_is_dropped_when_its_step_fails_is_silent(
    model: lily.Model, expected: list[Any]
) -> None:
    session = model.session(context=10)
    session.prefill(PROMPT)
    kept = session.snapshot()
    stream = session.stream(3, GREEDY, stop_ids=())
    next(stream)
    _testing.fake_set("fail_command_buffer", "1:2")  # is in flight
    del stream  # an exception here would be printed, and fails the test
    with pytest.raises(lily.DeviceError, match="the session's state was lost"):
        session.decode(3)
    session.restore(kept)
    assert np.array_equal(session.decode(3), expected[1])
