"""Memory: what is refused beforehand, what running out of it leaves, and what does not grow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import lily
import random_checkpoint

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_beyond_its_limit_is_refused_with_both_numbers(
    checkpoint: Callable[..., Path],
) -> None:
    need = lily.plan(checkpoint("heads"))
    said = r"weights take 0\.01 GB.* expected at most 0\.00 GB in all"
    with pytest.raises(lily.DeviceError, match=said):
        lily.Model.load(checkpoint("heads"), memory_limit=need.weights // 2)


def test_a_context_beyond_the_limit_is_refused_before_a_session_is_made(
    checkpoint: Callable[..., Path],
) -> None:
    need = lily.plan(checkpoint("tiny"))
    limit = need.total(10_000)
    with lily.Model.load(checkpoint("tiny"), memory_limit=limit, reuse_memory=0) as model:
        most = model.info.memory.largest_context
        assert 9_000 < most <= 10_000
        assert model.info.context <= most
        with pytest.raises(lily.ContextError, match=rf"context: {most + 1}.*{most}"):
            model.session(context=most + 1)
        model.session(context=most).prefill([1, 2, 3])
        with pytest.raises(lily.ContextError, match=rf"context: {most + 1}.*{most}"):
            lily.Model.load(checkpoint("tiny"), memory_limit=limit, context=most + 1)


OUT_OF_MEMORY = """
import resource, sys
import lily

model = lily.Model.load(sys.argv[1], context=200_000, reuse_memory=0)
session = model.session()
session.prefill(list(range(100)))
want = model.session().prefill([1, 2, 3]).argmax()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 8_000_000, resource.RLIM_INFINITY))
try:
    session.prefill([5] * 150_000)
except lily.DeviceError as error:
    print(type(error).__name__, error)
print(session.position, model.session().prefill([1, 2, 3]).argmax() == want)
"""


@LINUX
def test_running_out_of_memory_is_an_error_and_the_next_small_call_works(
    checkpoint: Callable[..., Path],
) -> None:
    error, after = run(OUT_OF_MEMORY, checkpoint("tiny")).splitlines()
    assert error.startswith("DeviceError")
    assert after.endswith("True")


GROWTH = """
import os, sys
import lily

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model = lily.Model.load(sys.argv[1], context=40_000, chunk=256, reuse_memory=0)
model.session().prefill([7] * 300)
levels = [resident()]
for n in (2_000, 16_000):
    session = model.session()
    session.prefill([7] * n)
    levels.append(resident() - session._live().kv_bytes)
    del session
print(*levels)
"""


@LINUX
def test_temporaries_do_not_grow_with_the_prompt(checkpoint: Callable[..., Path]) -> None:
    """All that eight times the tokens take is their own keys and values."""
    _, short, long = map(int, run(GROWTH, checkpoint("tiny")).split())
    assert long - short < 2_000_000


MEASURED = """
import gc, os, sys
import lily

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

tokens = [1] * 4_000
lily.Model.load(sys.argv[1], threads=2, reuse_memory=0).session().prefill(tokens)  # warms up
before = resident()
model = lily.Model.load(sys.argv[2], threads=2, reuse_memory=0)
session = model.session()
session.prefill(tokens)
session.decode(1)
print(resident() - before, lily.plan(sys.argv[2]).total(4_096))
"""


@LINUX
def test_a_plan_says_what_a_loaded_model_and_its_session_take(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Within a tenth, on weights of 73 MB: on less, a process's own ups and downs would show."""
    dims = replace(random_checkpoint.PRESETS["heads"], hidden=512, layers=8, experts=32)
    large = random_checkpoint.write(tmp_path, replace(dims, expert_width=256))
    taken, planned = map(int, run(MEASURED, checkpoint("tiny"), large).split())
    assert taken == pytest.approx(planned, rel=0.1)
