"""Kernel libraries from Python: run a kernel on NumPy arrays.

library = Library.compile(source, mode="detect")
result = library.run("row_product", groups=8, threads=64,
                     buffers={0: read(x), 1: write(y)})
assert not result.reports
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from softmetal import toolchain
from softmetal.build import build

Order = Literal["in_turn", "reversed", "random", "ahead"]
ORDERS: tuple[Order, ...] = ("in_turn", "reversed", "random", "ahead")
Array = NDArray[Any]

_SOURCES = ("fiber.cpp", "report.cpp", "emulator.cpp", "detector.cpp", "library.cpp")


class _Argument(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("index", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(_Argument)),
        ("n_arguments", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
    )


class _Constant(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("index", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
    )


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _Binding(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_uint32),
        ("base", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("reads", _Range),
        ("writes", _Range),
        ("defined", ctypes.c_void_p),
    )


class _ThreadgroupMemory(ctypes.Structure):
    _fields_ = (("index", ctypes.c_uint32), ("bytes", ctypes.c_uint32))


class _ConstantValue(ctypes.Structure):
    _fields_ = (("index", ctypes.c_uint32), ("value", ctypes.c_void_p))


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.POINTER(_Kernel)),
        ("groups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("bindings", ctypes.POINTER(_Binding)),
        ("n_bindings", ctypes.c_uint32),
        ("threadgroup_memory", ctypes.POINTER(_ThreadgroupMemory)),
        ("n_threadgroup_memory", ctypes.c_uint32),
        ("constants", ctypes.POINTER(_ConstantValue)),
        ("n_constants", ctypes.c_uint32),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("other_file", ctypes.c_char_p),
        ("other_line", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("lane", ctypes.c_uint32),
        ("other_lane", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
    )


class _Counts(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_uint32),
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("distinct_read", ctypes.c_uint64),
        ("distinct_written", ctypes.c_uint64),
    )


@functools.cache
def _emulator() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(emulator_library()))
    pointer, uint32 = ctypes.c_void_p, ctypes.c_uint32
    for name, result, arguments in (
        ("open", pointer, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]),
        ("close", None, [pointer]),
        ("detecting", ctypes.c_int, [pointer]),
        ("kernel_count", uint32, [pointer]),
        ("kernel", ctypes.POINTER(_Kernel), [pointer, uint32]),
        ("constant_count", uint32, [pointer]),
        ("constant", ctypes.POINTER(_Constant), [pointer, uint32]),
        ("run", pointer, [pointer, ctypes.POINTER(_Dispatch)]),
        ("report_count", uint32, [pointer]),
        ("report", ctypes.POINTER(_Report), [pointer, uint32]),
        ("counts_count", uint32, [pointer]),
        ("counts", ctypes.POINTER(_Counts), [pointer, uint32]),
        ("free", None, [pointer]),
    ):
        function = getattr(lib, f"softmetal_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def emulator_library() -> Path:
    """The emulator as a shared library, compiled once for each version of its sources."""
    source = toolchain.ROOT / "src"
    files = [*(toolchain.HERE / f for f in _SOURCES), source / "base" / "threads.cpp"]
    headers = [*toolchain.HERE.glob("*.h"), source / "base" / "threads.h"]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted([*files, *headers])))
    compiler = os.environ.get("CXX", "c++")

    def make(path: Path) -> None:
        subprocess.run(
            [compiler, "-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-fPIC", "-shared",
             "-fvisibility=hidden", f"-I{source}", *map(str, files), "-o", str(path), "-ldl",
             "-pthread"], check=True,
        )  # fmt: skip

    return toolchain.cached(f"libsoftmetal-{digest.hexdigest()[:24]}.so", make)


@dataclass
class Slot:
    """What is bound to a buffer index, and which of its bytes the dispatch declares.

    `reads` and `writes` are (first byte, number of bytes). `defined` has a byte for each byte of
    the array, 0 where nothing was written yet.
    """

    array: Array
    reads: tuple[int, int] = (0, 0)
    writes: tuple[int, int] = (0, 0)
    defined: NDArray[np.uint8] | None = None


def read(array: Array) -> Slot:
    return Slot(array, reads=(0, array.nbytes))


def write(array: Array) -> Slot:
    return Slot(array, writes=(0, array.nbytes))


def update(array: Array, *, defined: bool = True) -> Slot:
    """Read and written; with defined=False the contents are the kernel's to write first."""
    known = None if defined else np.zeros(array.nbytes, np.uint8)
    whole = (0, array.nbytes)
    return Slot(array, reads=whole, writes=whole, defined=known)


@dataclass(frozen=True)
class Argument:
    name: str
    kind: str  # "buffer", "threadgroup" or "builtin"
    index: int
    bytes: int  # of a reference's type, 0 for a pointer
    writable: bool


@dataclass(frozen=True)
class Kernel:
    name: str
    arguments: tuple[Argument, ...]
    max_threads: int
    threadgroup_bytes: int
    file: str
    line: int


@dataclass(frozen=True)
class Report:
    kind: str
    text: str
    file: str
    line: int
    other_line: int
    group: tuple[int, int, int]
    lane: int
    other_lane: int
    count: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Counts:
    """Bytes that accesses of a slot asked for, and different bytes among them."""

    read: int
    written: int
    distinct_read: int
    distinct_written: int


@dataclass(frozen=True)
class Result:
    reports: list[Report]
    counts: dict[int, Counts]  # of each buffer index, from a detecting library


class Library:
    """A compiled kernel library."""

    def __init__(self, path: Path) -> None:
        self._lib = _emulator()
        error = ctypes.create_string_buffer(1024)
        self._library = self._lib.softmetal_open(str(path).encode(), error, len(error))
        if not self._library:
            raise RuntimeError(error.value.decode())
        self.path = path
        self.detecting = bool(self._lib.softmetal_detecting(self._library))
        self._kernels = {
            k.contents.name.decode(): k
            for i in range(self._lib.softmetal_kernel_count(self._library))
            if (k := self._lib.softmetal_kernel(self._library, i))
        }
        self.kernels = {name: _described(k.contents) for name, k in self._kernels.items()}
        self.constants: dict[str, tuple[int, str, int]] = {}  # index, type, bytes
        for i in range(self._lib.softmetal_constant_count(self._library)):
            c = self._lib.softmetal_constant(self._library, i).contents
            self.constants[c.name.decode()] = (c.index, c.type.decode(), c.bytes)

    @classmethod
    def compile(cls, source: str, **options: Any) -> Library:
        """Compile and open; the options are those of softmetal.build.build."""
        return cls(build(source, **options))

    def __del__(self) -> None:
        if getattr(self, "_library", None):
            self._lib.softmetal_close(self._library)

    def run(
        self,
        kernel: str,
        *,
        groups: int | tuple[int, ...],
        threads: int | tuple[int, ...],
        buffers: Mapping[int, Slot | Array | np.generic],
        threadgroup: Mapping[int, int] | None = None,
        constants: Mapping[str, object] | None = None,
        order: Order = "in_turn",
        seed: int = 0,
        workers: int = 2,
    ) -> Result:
        """Run one dispatch.

        Args:
            kernel: its host name.
            groups: threadgroups, up to three numbers.
            threads: threads of a threadgroup, up to three numbers.
            buffers: what is bound to each index. A plain array or scalar is only read.
            threadgroup: bytes of each threadgroup argument.
            constants: function constants by name; the others are undefined.
            order: which lane runs when several can.
            seed: of the random order, and of which simdgroup goes ahead.
            workers: threads for the threadgroups of a plain library.

        Raises:
            KeyError: no such kernel or function constant.
        """
        slots = {i: s if isinstance(s, Slot) else read(np.asarray(s)) for i, s in buffers.items()}
        memory = threadgroup or {}
        values = [
            (self.constants[name][0], _constant(self.constants[name], value))
            for name, value in (constants or {}).items()
        ]
        lengths = [_ThreadgroupMemory(index, size) for index, size in memory.items()]
        given = [_ConstantValue(i, ctypes.cast(v, ctypes.c_void_p)) for i, v in values]
        dispatch = _Dispatch(
            kernel=self._kernels[kernel],
            groups=_three(groups),
            threads=_three(threads),
            bindings=(_Binding * len(slots))(*(_binding(i, s) for i, s in slots.items())),
            n_bindings=len(slots),
            threadgroup_memory=(_ThreadgroupMemory * len(lengths))(*lengths),
            n_threadgroup_memory=len(memory),
            constants=(_ConstantValue * len(given))(*given),
            n_constants=len(given),
            order=ORDERS.index(order),
            seed=seed,
            workers=workers,
        )
        result = self._lib.softmetal_run(self._library, dispatch)
        try:
            return Result(list(self._reports(result)), dict(self._counts(result)))
        finally:
            self._lib.softmetal_free(result)

    def _reports(self, result: int) -> Iterator[Report]:
        for i in range(self._lib.softmetal_report_count(result)):
            r = self._lib.softmetal_report(result, i).contents
            yield Report(
                r.kind.decode(), r.text.decode(), r.file.decode(), r.line, r.other_line,
                (r.group[0], r.group[1], r.group[2]), r.lane, r.other_lane, r.count,
            )  # fmt: skip

    def _counts(self, result: int) -> Iterator[tuple[int, Counts]]:
        for i in range(self._lib.softmetal_counts_count(result)):
            c = self._lib.softmetal_counts(result, i).contents
            yield (
                c.index,
                Counts(c.read_bytes, c.written_bytes, c.distinct_read, c.distinct_written),
            )


def _described(k: _Kernel) -> Kernel:
    kinds = ("buffer", "threadgroup", "builtin")
    arguments = tuple(
        Argument(a.name.decode(), kinds[a.kind], a.index, a.bytes, bool(a.writable))
        for a in k.arguments[: k.n_arguments]
    )
    return Kernel(
        k.name.decode(), arguments, k.max_threads, k.threadgroup_bytes, k.file.decode(), k.line
    )


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def _binding(index: int, slot: Slot) -> _Binding:
    if not slot.array.flags.c_contiguous:
        raise ValueError(f"buffer {index}: the array is not contiguous")
    if slot.writes[1] and not slot.array.flags.writeable:
        raise ValueError(f"buffer {index}: the array is not writeable")
    defined = None if slot.defined is None else slot.defined.ctypes.data
    return _Binding(
        index, slot.array.ctypes.data, slot.array.nbytes, slot.reads, slot.writes, defined
    )


def _constant(constant: tuple[int, str, int], value: object) -> ctypes.Array[ctypes.c_char]:
    _, type_, size = constant
    dtype = {"float": np.float32, "half": np.float16, "bool": np.bool_}.get(type_)
    raw = np.array(value, dtype or np.dtype(f"{'u' if type_[0] == 'u' else 'i'}{size}")).tobytes()
    return ctypes.create_string_buffer(raw, size)
