"""Damaged checkpoints raise CheckpointError and nothing else, soon and in little memory.

LILY_FUZZ_CASES sets the number of seeded cases (default 3,000; a long run uses 100,000 or more),
LILY_FUZZ_SEED the first seed. A failure names the seed of its case: `mutate(files, seed)`.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparse_checkpoint as sparse
from hostile.mutate import mutate
from lily.checkpoint import Checkpoint, open_checkpoint
from lily.errors import CheckpointError
from lily.files import parse_json, read_header
from sparse_checkpoint import Blob, build, write

CASES = int(os.environ.get("LILY_FUZZ_CASES", "3000"))
FIRST_SEED = int(os.environ.get("LILY_FUZZ_SEED", "0"))
CASE_SECONDS = 5.0  # a case takes about a millisecond; the rest is for a busy machine
GROWTH_BYTES = 512 << 20  # of the whole process over all cases

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def folder() -> Iterator[Path]:
    # Files come and go thousands of times: in memory where the system offers that.
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lily-fuzz-", dir=base) as name:
        yield Path(name)


def checkpoints() -> dict[str, dict[str, Blob]]:
    published = sparse.flat(sparse.config(tie_word_embeddings=True, layer_types=None))
    return {
        "mlx": build(),
        "mlx sharded": build(shards=3),
        "published flat": build(published, "published"),
        "published sharded": build(form="published", shards=2),
    }


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_consistent(found: Checkpoint) -> None:
    """What passes must be safe to read: every range inside its file, none shared."""
    sizes = [path.stat().st_size for path in found.files]
    ends = [0] * len(sizes)
    for entry in sorted(found.tensors.values(), key=lambda e: (e.file, e.offset)):
        assert ends[entry.file] <= entry.offset
        ends[entry.file] = entry.offset + entry.nbytes
        assert ends[entry.file] <= sizes[entry.file]
    assert all(0 <= token < found.config.vocab_size for token in found.stop_ids)


@pytest.mark.parametrize("kind", list(checkpoints()))
def test_mutations(kind: str, folder: Path) -> None:
    files = checkpoints()[kind]
    check_consistent(open_checkpoint(write(folder / "good", files)))
    before, accepted, n = peak_bytes(), 0, -(-CASES // len(checkpoints()))
    at = folder / "case"
    for seed in range(FIRST_SEED, FIRST_SEED + n):
        case = mutate(files, seed)
        write(at, case.files)
        start = time.perf_counter()
        try:
            check_consistent(open_checkpoint(at))
            accepted += 1
        except CheckpointError as error:
            message = str(error)
            assert 0 < len(message) < 1500, (seed, case.what, message)
            message.encode()  # printable wherever it goes
        except Exception as error:
            pytest.fail(f"{kind}, seed {seed}: {case.what}: {type(error).__name__}: {error}")
        took = time.perf_counter() - start
        assert took < CASE_SECONDS, (seed, case.what, took)
        for name in case.files:
            (at / name).unlink()
    assert peak_bytes() - before < GROWTH_BYTES
    # Most damage matters. Some does not: a mutated chat template, a key nobody reads.
    assert accepted < n / 2
    shutil.rmtree(at)


def test_mutations_are_reproducible() -> None:
    files = checkpoints()["mlx sharded"]
    assert [mutate(files, seed) for seed in range(50)] == [mutate(files, s) for s in range(50)]


@relaxed
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_any_header_bytes(text: bytes, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.safetensors"
        for head in (text, length.to_bytes(8, "little") + text, sparse.pack_header(text, 0).head):
            path.write_bytes(head)
            try:
                assert read_header(path) == {}
            except CheckpointError as error:
                str(error).encode()


OFFSETS = st.lists(st.integers(-1, 40) | st.integers(), min_size=1, max_size=3)
ENTRIES = st.dictionaries(
    st.text(max_size=4),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "F4"]),
            "shape": st.lists(st.integers(0, 8) | st.integers(), max_size=3),
            "data_offsets": OFFSETS,
        }
    ),
    max_size=4,
)


@relaxed
@given(ENTRIES, st.integers(0, 40))
def test_any_ranges(header: dict[str, object], n_data: int) -> None:
    """What passes covers the data exactly."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), {"x": sparse.pack_header(header, n_data)})
        try:
            found = read_header(Path(name) / "x")
        except CheckpointError as error:
            str(error).encode()
            return
        assert sum(entry.nbytes for entry in found.values()) == n_data


@relaxed
@given(st.text() | st.binary())
def test_any_json(text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    try:
        parse_json(data, "x")
    except CheckpointError as error:
        str(error).encode()
