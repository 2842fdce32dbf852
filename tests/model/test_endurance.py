"""Many times over: cancelling, loading, sharing; and memory that does not grow.

LILY_ROUNDS sets how many cancellations (1,000 take some seconds on the tiny checkpoint).
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lily

ROUNDS = int(os.environ.get("LILY_ROUNDS", "1000"))
GREEDY = lily.Sampling.greedy()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_cancelling_at_random_points_leaves_no_trace(tiny: lily.Model) -> None:
    prompt = list(range(100, 150))
    fresh = tiny.session()
    fresh.prefill(prompt)
    want = fresh.stream(25, GREEDY, stop_ids=())
    list(want)

    rng = random.Random(1)
    session = tiny.session()
    for round_ in range(ROUNDS):
        delay = rng.random() * 0.006
        over = threading.Event()
        session.reset()

        def cancel(delay: float = delay, over: threading.Event = over) -> None:
            while not over.wait(delay):  # again, should it have come between two calls
                session.cancel()

        other = threading.Thread(target=cancel, daemon=True)
        other.start()
        try:
            session.prefill(prompt * rng.randint(1, 3))
            for _ in session.stream(None, lily.Sampling(seed=round_), stop_ids=()):
                pass
        except lily.Cancelled:
            pass
        over.set()
        other.join()
        if round_ % 20 == 0 or round_ == ROUNDS - 1:
            session.reset()
            session.prefill(prompt)
            stream = session.stream(25, GREEDY, stop_ids=())
            list(stream)
            assert stream.tokens == want.tokens


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_and_closing_fifty_times_keeps_memory_flat(
    checkpoint: Callable[..., Path],
) -> None:
    def once() -> None:
        with lily.Model.load(checkpoint("heads")) as model:
            model.generate([1, 2, 3], max_tokens=3).result()
        gc.collect()

    for _ in range(5):
        once()
    before = resident_bytes()
    for _ in range(50):
        once()
    weights = 8 << 20
    assert resident_bytes() - before < weights  # not even one of fifty was kept


def test_idle_means_idle(tiny: lily.Model) -> None:
    tiny.generate([1, 2, 3], max_tokens=20).result()
    time.sleep(0.05)  # threads spin for a moment after work
    before, used = time.perf_counter(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.2 * (time.perf_counter() - before)
