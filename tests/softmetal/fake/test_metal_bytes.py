"""What plans declare that they move is what the software Metal counts while whole passes run.

Counted are different bytes of each dispatch and slot, not loads: a row of the tiny model is shorter
than a simdgroup, whose last lanes load the first ones' bytes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import CONTRACTS, SOFTMETAL, metal_missing

import lily
from lily import _testing

MISSING = next((reason for op in CONTRACTS if (reason := metal_missing(op))), None)
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal counts"),
]

CHUNK = 32
WEIGHTS = ("packed",)
OTHERS = ("float32", "uint32", "act")
"""Types of slots. The KV cache is missing: plans do not say how much of it there is."""


@pytest.fixture(autouse=True)
def no_reports() -> Iterator[None]:
    yield
    _testing.fake_set("mode", None)
    reports = _testing.fake_reports()
    assert not reports, "\n".join(reports)


def moved(types: tuple[str, ...]) -> tuple[int, int]:
    """Bytes read and written so far."""
    counted = _testing.fake_moved()
    return sum(counted[t][1] for t in types), sum(counted[t][2] for t in types)


def test_declared_and_counted_bytes_agree(checkpoint: Callable[..., Path]) -> None:
    def prefill() -> None:
        session.prefill([(i * 37 + 11) % 280 for i in range(2 * CHUNK)])

    def draw(sampling: lily.Sampling) -> None:
        with session.stream(3, sampling, stop_ids=()) as stream:
            for _ in stream:
                pass

    passes: list[tuple[Callable[[], object], list[str]]] = [
        (prefill, ["prefill", "prompt"]),
        (lambda: session.decode(3), ["step"]),
        (lambda: draw(lily.Sampling(temperature=0)), ["pick", "next_greedy", "next_greedy"]),
        # The pending token first.
        (
            lambda: draw(lily.Sampling(temperature=0.8, seed=1)),
            ["step", "pick", "next_drawn", "next_drawn"],
        ),
    ]
    _testing.fake_set("mode", "detect")
    folder = checkpoint("tiny")
    with lily.Model.load(folder, device="metal", precision="float32", chunk=CHUNK) as model:
        engine = model._live_engine()
        session = model.session(context=3 * CHUNK)
        for run, plans in passes:
            weights, others = moved(WEIGHTS), moved(OTHERS)
            run()
            read = moved(WEIGHTS)[0] - weights[0], moved(OTHERS)[0] - others[0]
            written = moved(OTHERS)[1] - others[1]
            stats = [engine.plan_stats(kind, True, False) for kind in plans]
            declared = {key: sum(s[key] for s in stats) for key in stats[0]}
            # All but the padding between parts of a weight.
            assert 0.995 < read[0] / declared["weight_bytes"] <= 1, plans
            # Of the ring, declared as a whole, a step writes a quarter. Tables of a pass have room
            # for the worst case.
            assert 0.85 < read[1] / declared["read_bytes"] <= 1, plans
            assert 0.9 < written / declared["written_bytes"] <= 1, plans
            assert moved(WEIGHTS)[1] == 0
