"""Runs one kernel on NumPy arrays: what every op test shares.

`Op` knows a contract: it takes arrays by slot name, encodes activations for the build under test,
fills outputs with poison, checks that nothing around them was touched, and decodes the results.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from numpy.typing import NDArray

from lily import _testing
from softmetal import toolchain

Array = NDArray[Any]
Floats = NDArray[np.float32]

CONTRACTS: dict[str, dict[str, Any]] = _testing.contracts()
PRECISIONS = ("fast", "float32")
LONG = "LILY_LONG" in os.environ
WIDE_PRECISIONS = PRECISIONS if LONG else ("fast",)
"""Of kernels at the released model's widths, whose small shapes are tested in both."""

FLOAT32_TOLERANCE = 1e-5
"""Relative RMS. float32 sums of a few thousand terms leave about 1e-6."""

FAST_TOLERANCE = 4e-3
"""Relative RMS of float32 results in the fast build: a device may round activations to bf16, which
leaves about 1e-3."""

BF16_ULPS = 2.0
"""In units of the last place of the largest value: one rounding of the input, one of the output."""

GUARD = 64
"""Elements before and after each output that must stay as they were."""

POISON = {
    np.dtype(np.uint8): 0xFF,
    np.dtype(np.float32): np.nan,
    np.dtype(np.uint16): 0xFFFF,
    np.dtype(np.uint32): 0xFFFFFFFF,
}


def isas() -> list[str]:
    """The instruction sets that this machine can run."""
    found = []
    for isa in ("portable", "avx2", "avx512", "avx512_bf16"):
        try:
            _testing.description(1, isa)
        except Exception:
            continue
        found.append(isa)
    return found


# The Metal device over the software Metal. Where a test takes an instruction set, it takes "metal"
# (with the detector) or "metal plain" (without, and faster) as well. Each set of constants and
# weight forms is a library of its own, compiled in a second or two and kept: use few. More words
# name another device: "m1", or "tensor" for an M5 whose tensor operations are used.


SOFTMETAL = hasattr(_testing, "fake_set")
if SOFTMETAL:
    os.environ.setdefault("LILY_SOFTMETAL_PYTHON", sys.executable)


def is_metal(isa: str) -> bool:
    return isa.startswith("metal")


def metal_missing(op: str | None = None) -> str | None:
    """Why an op cannot run on the Metal device here, or None."""
    if not hasattr(_testing, "has_metal_kernel"):
        return "the Metal device is not in this build"
    if SOFTMETAL and (reason := toolchain.why_missing()):
        return f"the software Metal {reason}"
    if op and not _testing.has_metal_kernel(op):
        return f"there is no metal/{op}.metal yet, or no grid for it"
    return None


@contextmanager
def metal_order(order: str, seed: int = 1) -> Iterator[None]:
    """The order in which the software Metal runs lanes: one of softmetal.library.ORDERS."""
    if not SOFTMETAL:
        yield
        return
    _testing.fake_set("order", order)
    _testing.fake_set("seed", str(seed))
    try:
        yield
    finally:
        _testing.fake_set("order", None)
        _testing.fake_set("seed", None)


@contextmanager
def _chip(isa: str) -> Iterator[None]:
    """The chip and the system that a device made for `isa` finds."""
    settings = {}
    if SOFTMETAL and "tensor" in isa:
        settings = {"chip": "5", "system": "26.2"}
    elif SOFTMETAL and "m1" in isa:
        settings = {"chip": "1"}
    try:
        for name, value in settings.items():
            _testing.fake_set(name, value)
        yield
    finally:
        for name in settings:
            _testing.fake_set(name, None)


# bfloat16 as its bits in uint16.


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """The bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: Array) -> Floats:
    return from_bf16(to_bf16(values))


def rounded(values: Array, precision: str) -> Floats:
    """What an activation keeps of `values` in a build."""
    return round_bf16(values) if precision == "fast" else np.asarray(values, np.float32)


def normals(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


# Keys and values as int8: bytes of codes [heads, capacity, DH], then of scales [heads, capacity].


def to_int8(rows: Array) -> NDArray[np.uint8]:
    """A cache that holds rows [heads, capacity, DH]."""
    scales = (np.abs(rows).max(-1) / 127).astype(np.float32)
    codes = np.rint(rows / np.maximum(scales, 1e-30)[..., None]).astype(np.int8)
    return np.concatenate([codes.view(np.uint8).ravel(), scales.view(np.uint8).ravel()])


def from_int8(cache: Array, shape: tuple[int, ...]) -> NDArray[np.float64]:
    codes, scales = _split_int8(cache, shape)
    return codes.astype(np.float64) * scales[..., None]


def _split_int8(cache: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    n = int(np.prod(shape))
    return cache[:n].view(np.int8).reshape(shape), cache[n:].view(np.float32).reshape(shape[:-1])


def check_new_rows(found: Array, before: Array, rows: Array, position: int) -> None:
    """That a cache got rows [heads, T, DH] from `position` on, and nothing else changed. Either as
    int8 bytes."""
    shape = (len(rows), len(before) // len(rows) // (rows.shape[-1] + 4), rows.shape[-1])
    new = slice(position, position + rows.shape[1])
    codes, scales = _split_int8(found, shape)
    assert np.allclose(scales[:, new], np.abs(rows).max(-1) / 127, rtol=1e-5, atol=0)
    off = np.abs(codes[:, new] * scales[:, new, None].astype(np.float64) - rows)
    assert np.all(off <= 0.501 * scales[:, new, None])
    for a, b in zip(_split_int8(found, shape), _split_int8(before, shape), strict=True):
        assert np.array_equal(np.delete(a, new, 1), np.delete(b, new, 1))


# Packed weights.


@dataclass
class Weight:
    """A weight and the float32 matrices, one for each segment, that it stands for."""

    raw: list[tuple[Any, ...]]
    """What `_testing.pack` takes."""
    step: int
    matrices: list[Floats]
    """Each [rows, cols], or [experts, rows, cols]."""
    forms: dict[str, Any] = field(default_factory=dict)

    def on(self, isa: str) -> Any:
        """Packed by the device that runs `isa`."""
        isa = "metal" if is_metal(isa) else ""
        if isa not in self.forms:
            self.forms[isa] = _testing.pack(self.raw, step=self.step, isa=isa)
        return self.forms[isa]

    @property
    def packed(self) -> Any:
        """Packed by the CPU device."""
        return self.on("")

    @property
    def matrix(self) -> Floats:
        """All segments, one below the other."""
        return np.concatenate(self.matrices, axis=-2)


@dataclass
class RawSegment:
    """A matrix [experts, rows, cols] as a checkpoint has it."""

    bits: int
    weight: Array
    scales: Array | None
    biases: Array | None
    values: Floats


def random_segment(
    rng: np.random.Generator, bits: int, rows: int, cols: int, experts: int = 1
) -> RawSegment:
    """Random codes; scales of either sign; values of about 1 / sqrt(cols)."""
    shape = (experts, rows, cols)
    if bits == 16:
        weight = to_bf16(rng.standard_normal(shape) / np.sqrt(cols))
        return RawSegment(16, weight, None, None, from_bf16(weight))
    levels = 1 << bits
    codes = rng.integers(0, levels, shape, dtype=np.uint32)
    groups = (experts, rows, cols // 64)
    step = rng.uniform(2.0, 4.0, groups) / levels / np.sqrt(cols)
    scales = to_bf16(step * rng.choice([-1, 1], groups))
    centre = rng.standard_normal(groups) * 0.2 / np.sqrt(cols)
    biases = to_bf16(centre - from_bf16(scales) * (levels / 2))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = codes.reshape(experts, rows, -1, len(shifts)) << shifts
    by_group = codes.reshape(*groups, 64).astype(np.float32)
    values = from_bf16(scales)[..., None] * by_group + from_bf16(biases)[..., None]
    return RawSegment(bits, words.sum(-1, dtype=np.uint32), scales, biases, values.reshape(shape))


def pack(segments: Sequence[RawSegment], step: int = 1 << 30, misalign: int = 0) -> Weight:
    """Packs on the CPU device, `step` rows at a time, from arrays `misalign` bytes off."""

    def as_bytes(a: Array | None) -> Array | None:
        if a is None:
            return None
        flat = a.view(np.uint8).reshape(*a.shape[:2], -1)
        moved = np.zeros(misalign + flat.size, np.uint8)[misalign:].reshape(flat.shape)
        moved[...] = flat
        return moved

    raw = [
        (
            s.bits,
            *s.values.shape[1:],
            as_bytes(s.weight),
            as_bytes(s.scales),
            as_bytes(s.biases),
        )
        for s in segments
    ]
    single = segments[0].values.shape[0] == 1
    weight = Weight(raw, step, [s.values[0] if single else s.values for s in segments])
    weight.on("")
    return weight


def random_weight(
    rng: np.random.Generator,
    shapes: Sequence[tuple[int, int]],
    bits: int | Sequence[int] = 4,
    experts: int = 1,
) -> Weight:
    """A weight of segments [rows, cols], all of one width or each of its own."""
    widths = [bits] * len(shapes) if isinstance(bits, int) else bits
    return pack(
        [random_segment(rng, b, *shape, experts) for b, shape in zip(widths, shapes, strict=True)]
    )


# Dispatches.


@cache
def params_fields(op: str) -> list[tuple[str, str]]:
    """Names and struct codes of an op's parameters, read from its contract header."""
    text = (Path(__file__).parents[2] / "metal" / f"{op}.h").read_text()
    body = re.search(r"struct \w+_Params \{(.*?)\};", text, re.S)
    assert body is not None
    codes = {"uint32_t": "I", "uint64_t": "Q", "float": "f"}
    fields = [(n, codes[t]) for t, n in re.findall(r"(uint32_t|uint64_t|float) (\w+);", body[1])]
    assert struct.calcsize("".join(c for _, c in fields)) == CONTRACTS[op]["params_bytes"]
    return fields


@dataclass
class Result:
    """Outputs by slot name, activations decoded to float32."""

    outputs: dict[str, Array]
    weight_bytes: Any
    """Packed bytes read, in the CPU device's form. Equal to anything on the Metal device."""
    precision: str
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Different bytes of each slot that were read and written, counted by the detector."""

    def __getitem__(self, slot: str) -> Array:
        return self.outputs[slot]

    def expect(
        self, slot: str, expected: Array, act: bool = False, *, like: Array | None = None
    ) -> None:
        """Asserts that an output, of activations or float32, is as the build allows.

        `like` are values of the same kind: an output of one value may have cancelled to nearly 0,
        and rounding is no smaller for that.
        """
        if self.precision == "float32":
            assert_close32(self[slot], expected, like=like)
        elif act:
            assert_close16(self[slot], expected)
        else:
            assert_close32(self[slot], expected, FAST_TOLERANCE)


@dataclass
class Guarded:
    """An output with margins on both sides."""

    whole: Array
    shape: tuple[int, ...]

    @classmethod
    def around(cls, values: Array) -> Guarded:
        margin = np.full(GUARD, POISON[values.dtype], values.dtype)
        return cls(np.concatenate([margin, values.ravel(), margin]), values.shape)

    @property
    def array(self) -> Array:
        return self.whole[GUARD:-GUARD].reshape(self.shape)

    def check(self, name: str) -> None:
        margins = np.concatenate([self.whole[:GUARD], self.whole[-GUARD:]])
        poison = np.full(2 * GUARD, POISON[self.whole.dtype], self.whole.dtype)
        assert margins.tobytes() == poison.tobytes(), f"{name}: written outside"


def all_constants(op: str, given: Mapping[str, float]) -> dict[str, float]:
    """0 for those that are not given: whoever names a variant asks for it."""
    return dict.fromkeys(CONTRACTS[op]["constants"], 0) | dict(given)


def run(
    op: str,
    constants: Mapping[str, float],
    params: Mapping[str, float],
    precision: str = "float32",
    *,
    threads: int = 1,
    isa: str = "",
    **slots: Any,
) -> Result:
    """One dispatch.

    Args:
        isa: an instruction set of the CPU device, "metal", "metal plain" or one of these with the
            name of a chip. The test is skipped where there is no such kernel.
        slots: by name: an array for READ and UPDATE (activations as floats, an int8 cache as
            bytes), a `Weight` for packed
            ones, a shape for WRITE. A slot left out is not bound.
    """
    if is_metal(isa):
        if reason := metal_missing(op):
            pytest.skip(reason)
        if SOFTMETAL:
            _testing.fake_set("mode", "plain" if "plain" in isa else "detect")
            _testing.fake_reports()
    contract = CONTRACTS[op]
    unknown = set(slots) - {name for name, *_ in contract["slots"]}
    assert not unknown, unknown
    bound: list[Any] = []
    outputs: dict[str, Guarded] = {}
    for name, kind, access, _ in contract["slots"]:
        value = slots.get(name)
        if value is None or kind == "packed":
            bound.append(None if value is None else value.on(isa))
            continue
        dtype = storage(kind, precision)
        fresh = access == "write"
        value = np.full(value, POISON[dtype], dtype) if fresh else encode(value, dtype)
        if access != "read":
            outputs[name] = Guarded.around(value)
            value = outputs[name].array
        bound.append(value)
    constants = all_constants(op, constants)
    packed_params = struct.pack(
        "".join(code for _, code in params_fields(op)),
        *(params.get(name, 0) for name, _ in params_fields(op)),
    )
    with _chip(isa):
        read = _testing.run(
            op, constants, packed_params, bound, precision=precision, threads=threads, isa=isa
        )
    for name, output in outputs.items():
        output.check(name)
    result = Result({n: decode(o.array) for n, o in outputs.items()}, read, precision)
    if is_metal(isa):
        result.weight_bytes = ANY
    if is_metal(isa) and SOFTMETAL:
        reports = _testing.fake_reports()
        assert not reports, "\n".join(reports)
        for i, (name, *_) in enumerate(contract["slots"]):
            result.counts[name] = _testing.fake_counts(i + 1)
    return result


def storage(kind: str, precision: str) -> np.dtype[Any]:
    if kind == "uint32":
        return np.dtype(np.uint32)
    narrow = kind in ("act", "cache") and precision == "fast"
    return np.dtype(np.uint16 if narrow else np.float32)


def encode(values: Array, dtype: np.dtype[Any]) -> Array:
    if values.dtype == np.uint8:
        return values
    if dtype == np.uint16:
        return to_bf16(values)
    return np.ascontiguousarray(values, dtype)


def decode(values: Array) -> Array:
    return from_bf16(values) if values.dtype == np.uint16 else values.copy()


# Comparisons.


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def relative_rms(found: Array, expected: Array, like: Array | None = None) -> float:
    """RMS of the difference over RMS of `expected`, or of `like` if that is larger."""
    scale = max(rms(expected), 0.0 if like is None else rms(like))
    error = rms(np.subtract(found, expected, dtype=np.float64))
    return error / scale if scale > 0 else error


def assert_close32(
    found: Array,
    expected: Array,
    tolerance: float = FLOAT32_TOLERANCE,
    like: Array | None = None,
) -> None:
    """float32 results against float64 ones."""
    assert found.shape == expected.shape
    assert relative_rms(found, expected, like) <= tolerance


def assert_close16(found: Array, expected: Array, ulps: float = BF16_ULPS) -> None:
    """Every value within some bf16 ulps of the largest."""
    assert found.shape == expected.shape
    largest = float(np.max(np.abs(expected), initial=1e-30))
    ulp = 2.0 ** (np.floor(np.log2(largest)) - 7)
    worst = float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0))
    assert worst <= ulps * ulp, f"off by {worst / ulp:.2f} ulp"
