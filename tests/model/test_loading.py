"""A load from end to end: where from, what of it, and what is told while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
import random_checkpoint

PROMPT = list(range(40, 90))


@pytest.mark.parametrize("form", ["mlx", "published"])
def test_tensors_that_a_text_model_has_not_change_no_bit(
    checkpoint: Callable[..., Path], form: str
) -> None:
    """The vision tower's, and the draft head's in the published form."""
    logits, bytes_ = [], []
    for extras in (True, False):
        with lily.Model.load(checkpoint("tiny", form=form, extras=extras)) as model:
            logits.append(np.asarray(model.session().prefill(PROMPT)))
            bytes_.append(model.info.memory.weights)
    assert np.array_equal(*logits)
    assert bytes_[0] == bytes_[1]


SCRIPT = """
import os, sys
import lily

with lily.Model.load(sys.argv[1]) as model:
    print(*model.generate("Once upon", max_tokens=5, temperature=0).result().tokens)
    session = model.session()
    session.prefill([1, 2, 3])
    session.save(sys.argv[2])
    assert model.load_session(sys.argv[2]).position == 3
"""


def test_from_an_empty_folder_and_a_path_of_any_letters(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    here, there = tmp_path / "nothing here", tmp_path / "mein größtes Modell 模型"
    here.mkdir()
    random_checkpoint.write(there, "tiny")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, there, there / "Sitzung 1 é.lily"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(lily.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    with lily.Model.load(checkpoint("tiny")) as model:
        want = model.generate("Once upon", max_tokens=5, temperature=0).result().tokens
    assert tuple(map(int, done.stdout.split())) == want
    assert list(here.iterdir()) == []


def test_progress_counts_bytes_to_the_last_and_is_silent_unasked(
    checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    lily.Model.load(checkpoint("heads"), progress=lambda *now: seen.append(now)).close()
    assert {what for what, _, _ in seen} == {"load"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    _, done, total = seen[-1]
    assert done == total > 1_000_000
    lily.Model.load(checkpoint("heads")).close()
    assert capfd.readouterr() == ("", "")


def test_a_model_loaded_in_one_thread_works_in_others(checkpoint: Callable[..., Path]) -> None:
    found: list[Any] = []

    def load() -> None:
        found.append(lily.Model.load(checkpoint("tiny")))

    def draw() -> None:
        found.append(found[0].generate(PROMPT, max_tokens=5, temperature=0).result().tokens)

    for work in (load, draw, draw):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    with found[0] as model:
        want = model.generate(PROMPT, max_tokens=5, temperature=0, reuse="off").result().tokens
    assert found[1:] == [want, want]


CROWDED = """
import resource
from lily import _core, DeviceError
with open("/proc/self/statm") as memory:
    used = int(memory.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    _core.Device("cpu", 2000)
except DeviceError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit that Linux keeps")
def test_more_threads_than_the_system_gives_are_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("threads: 2000, the system gives only ")
