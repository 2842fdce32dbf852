"""Libraries and dispatches: tables, what is refused, declared ranges, counts, errors as text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from softmetal import toolchain
from softmetal.build import CompileError, build
from softmetal.library import Argument, Library, Slot, read, update, write

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SOURCE = """\
#include <metal_stdlib>
using namespace metal;
constant int offset [[function_constant(3)]];

template <int N>
[[kernel, max_total_threads_per_threadgroup(16 * N)]] void add(
    const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    constant uint& n [[buffer(2)]], threadgroup float* scratch [[threadgroup(1)]],
    uint i [[thread_position_in_grid]], uint lane [[thread_position_in_threadgroup]]) {
  threadgroup float fixed[10];
  threadgroup uchar bytes[3];
  if (lane < 3) bytes[lane] = 1;
  if (lane < 10) fixed[lane] = float(bytes[min(lane, 0u)]);
  scratch[lane] = i < n ? in[i] : 0.0f;
  if (i < n) out[i] = scratch[lane] + float(offset);
}
template [[host_name("add_4")]] [[kernel]] decltype(add<4>) add<4>;

namespace other {
kernel void second(device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] += i;
}
}

kernel void poll(device uint* out [[buffer(0)]], const device uint* in [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = in[i];
}
"""


@pytest.fixture(scope="module")
def detecting() -> Library:
    return Library.compile(SOURCE, mode="detect", name="add.metal")


@pytest.fixture(scope="module")
def plain() -> Library:
    return Library.compile(SOURCE, mode="plain", name="add.metal")


def test_tables(plain: Library, detecting: Library) -> None:
    assert (plain.detecting, detecting.detecting) == (False, True)
    for library in (plain, detecting):
        assert set(library.kernels) == {"add_4", "second", "poll"}
        add = library.kernels["add_4"]
        assert add.max_threads == 64
        assert add.threadgroup_bytes == 48 + 16
        assert (add.file, add.line) == ("add.metal", 6)
        assert add.arguments == (
            Argument("in", "buffer", 0, 0, False),
            Argument("out", "buffer", 1, 0, True),
            Argument("n", "buffer", 2, 4, False),
            Argument("scratch", "threadgroup", 1, 0, True),
            Argument("i", "builtin", 0, 0, False),
            Argument("lane", "builtin", 0, 0, False),
        )
        assert library.kernels["second"].max_threads == 1024
        assert library.constants == {"offset": (3, "int", 4)}


def _add(library: Library, **changes: object) -> list[str]:
    arguments: dict[str, object] = {
        "groups": 1,
        "threads": 64,
        "buffers": {
            0: np.ones(64, np.float32),
            1: write(np.zeros(64, np.float32)),
            2: np.uint32(50),
        },
        "threadgroup": {1: 256},
        "constants": {"offset": -3},
    }
    return [str(r) for r in library.run("add_4", **{**arguments, **changes}).reports]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 65}, "65 threads in a threadgroup, the kernel allows 1 to 64"),
        ({"threads": (4, 4, 8)}, "128 threads"),
        ({"threadgroup": {}}, "scratch [[threadgroup(1)]] has no length"),
        ({"threadgroup": {1: 100}}, "not a multiple of 16"),
        ({"threadgroup": {1: 32 << 10}}, "32832 bytes of threadgroup memory, there are 32768"),
        ({"buffers": {}}, "in [[buffer(0)]] is not bound"),
        (
            {"buffers": {0: np.ones(1), 1: np.ones(1), 2: np.uint16(1)}},
            "n [[buffer(2)]] is of 4 bytes, 2 are bound",
        ),
        (
            {"buffers": {0: update(np.ones(1)), 1: np.ones(1), 2: np.uint32(1)}},
            "in [[buffer(0)]] is declared as written, the kernel cannot write it",
        ),
        (
            {"buffers": {0: Slot(np.ones(1), reads=(0, 9)), 1: np.ones(1), 2: np.uint32(1)}},
            "buffer 0: declares bytes beyond its end",
        ),
    ],
)
def test_refused_dispatches(plain: Library, changes: dict[str, object], message: str) -> None:
    assert any(message in text for text in _add(plain, **changes))


def test_add(plain: Library, detecting: Library) -> None:
    for library in (plain, detecting):
        out = np.full(64, 7.0, np.float32)
        # bytes[0] is written by lane 0 and read by others in the same epoch: a race, seeded.
        reports = _add(
            library, buffers={0: np.ones(64, np.float32), 1: write(out), 2: np.uint32(50)}
        )
        assert bool(reports) == library.detecting
        np.testing.assert_array_equal(out, [-2.0] * 50 + [7.0] * 14)


def test_only_declared_bytes_may_be_used(detecting: Library) -> None:
    given, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)

    def run(reads: tuple[int, int], writes: tuple[int, int]) -> list[tuple[str, int]]:
        out[:] = 99
        result = detecting.run(
            "poll", groups=1, threads=32,
            buffers={0: Slot(out, writes=writes), 1: Slot(given, reads=reads)},
        )  # fmt: skip
        return [(r.kind, r.line) for r in result.reports]

    line = 1 + SOURCE.splitlines().index("  out[i] = in[i];")
    assert run((0, 128), (0, 128)) == []
    np.testing.assert_array_equal(out, [*range(32), *[99] * 32])
    assert run((0, 124), (0, 128)) == [("out of bounds", line)]
    assert run((0, 128), (0, 124)) == [("out of bounds", line)]
    assert run((0, 128), (4, 124)) == [("out of bounds", line)]


def test_slots_of_one_array_are_kept_apart(detecting: Library) -> None:
    """A step out of one slot is not a step into its neighbour in the same allocation."""
    memory = np.zeros(64, np.uint32)
    first, second = memory[:32], memory[32:]
    right = detecting.run("poll", groups=1, threads=32, buffers={0: write(second), 1: read(first)})
    assert not right.reports
    wrong = detecting.run(
        "poll", groups=1, threads=33, buffers={0: write(memory[:]), 1: read(second)}
    )
    assert [r.kind for r in wrong.reports] == ["out of bounds"]


def test_overlapping_slots_share_their_memory(detecting: Library) -> None:
    memory = np.arange(32, dtype=np.uint32)
    same = detecting.run("poll", groups=1, threads=32, buffers={0: write(memory), 1: read(memory)})
    assert not same.reports  # each lane reads and writes its own
    shifted = detecting.run(
        "poll", groups=1, threads=31, buffers={0: write(memory[:31]), 1: read(memory[1:])}
    )
    assert {r.kind for r in shifted.reports} == {"race"}


def test_memory_that_nothing_wrote(detecting: Library) -> None:
    out, slot = np.zeros(32, np.uint32), update(np.zeros(32, np.uint32), defined=False)
    assert slot.defined is not None
    slot.defined[:64] = 1
    poll = {0: write(out), 1: Slot(slot.array, reads=(0, 128), defined=slot.defined)}
    result = detecting.run("poll", groups=1, threads=32, buffers=poll)
    assert [(r.kind, r.count) for r in result.reports] == [("uninitialised read", 16)]
    fill = {0: slot, 1: read(np.ones(32, np.uint32))}
    assert not detecting.run("poll", groups=1, threads=32, buffers=fill).reports
    assert slot.defined.all()
    assert not detecting.run("poll", groups=1, threads=32, buffers=poll).reports


def test_counts(detecting: Library) -> None:
    result = detecting.run(
        "second", groups=2, threads=32, buffers={0: update(np.zeros(100, np.uint32))}
    )
    counts = result.counts[0]
    assert (counts.read, counts.written) == (256, 256)
    assert (counts.distinct_read, counts.distinct_written) == (256, 256)


def test_workers_share_threadgroups(plain: Library) -> None:
    outs = []
    for workers in (1, 2, 4):
        out = np.zeros(64 * 1000, np.uint32)
        result = plain.run(
            "second", groups=1000, threads=64, buffers={0: update(out)}, workers=workers
        )
        assert not result.reports
        outs.append(out)
    assert all((out == np.arange(64000)).all() for out in outs)


def test_empty_grid(plain: Library, detecting: Library) -> None:
    for library in (plain, detecting):
        buffers = {0: update(np.zeros(4, np.uint32))}
        assert not library.run("second", groups=0, threads=64, buffers=buffers).reports


def test_libraries_are_cached() -> None:
    assert build(SOURCE) == build(SOURCE)
    assert build(SOURCE) != build(SOURCE, mode="detect")
    assert build(SOURCE, defines={"i": "j"}) != build(SOURCE)


def test_errors_are_text_with_lines() -> None:
    with pytest.raises(CompileError) as error:
        build(SOURCE.replace("out[i] += i;", "out[i] += missing;"), name="add.metal")
    line = 1 + SOURCE.splitlines().index("  out[i] += i;")
    assert f"add.metal:{line}:13: error: use of undeclared identifier 'missing'" in str(error.value)


def test_command(tmp_path: Path) -> None:
    source = tmp_path / "add.metal"
    source.write_text(SOURCE)
    out = tmp_path / "add.so"
    tests = Path(__file__).parents[1]

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "softmetal.build", *map(str, arguments)]
        return subprocess.run(words, cwd=tests, capture_output=True, text=True, check=False)

    done = command(source, "--out", out, "--mode", "detect")
    assert (done.returncode, done.stdout.strip()) == (0, str(out))
    assert Library(out).detecting
    assert command(source, "--check").returncode == 0
    bad = command(source, "-D", "offset=1")
    assert bad.returncode == 1
    assert f"{source}:3:" in bad.stderr
