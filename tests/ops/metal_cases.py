"""One dispatch of a Metal kernel and what it should leave; and sources that no device knows, such
as one without a barrier, run for the same dispatch."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    CONTRACTS,
    POISON,
    Result,
    Weight,
    all_constants,
    decode,
    encode,
    metal_order,
    params_fields,
    run,
    storage,
)

from softmetal.library import ORDERS, Library, Order, Slot, read

METAL = Path(__file__).parents[2] / "metal"


@dataclass
class Case:
    """One dispatch, and what it should leave."""

    op: str
    constants: dict[str, float]
    params: dict[str, float]
    slots: dict[str, Any]
    expected: dict[str, tuple[Any, bool]] = field(default_factory=dict)
    """Name → values, and whether they are activations."""
    precision: str = "float32"


def dispatch(case: Case, isa: str = "metal plain") -> Result:
    return run(case.op, case.constants, case.params, case.precision, isa=isa, **case.slots)


def check(case: Case, orders: Sequence[Order] = ORDERS, isa: str = "metal") -> Result:
    """Runs it on the Metal device, in each order of lanes."""
    for order in orders:
        with metal_order(order):
            got = dispatch(case, isa)
        for name, (values, act) in case.expected.items():
            if np.size(values):
                got.expect(name, np.asarray(values), act=act)
    return got


def flattened(name: str, seen: set[str] | None = None) -> str:
    """A source with lily's own headers in place of their includes."""
    seen = set() if seen is None else seen
    if name in seen:
        return ""
    seen.add(name)
    text = (METAL / name).read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(.*)"$', lambda m: flattened(m[1], seen), text, flags=re.M)


def run_source(
    case: Case,
    source: str,
    groups: tuple[int, ...],
    threads: int,
    order: Order = "ahead",
    tensors: bool = False,
) -> tuple[list[Any], Result]:
    """What the detector says of a source for a case's kernel, and the outputs."""
    library = Library.compile(
        source,
        mode="detect",
        name=f"{case.op}.metal",
        defines=_defines(case) | ({"LILY_TENSOR": "1"} if tensors else {}),
        language="metal4.0" if tensors else "metal3.1",
    )
    fields = params_fields(case.op)
    packed = struct.pack(
        "".join(code for _, code in fields), *(case.params.get(name, 0) for name, _ in fields)
    )
    buffers: dict[int, Any] = {0: np.frombuffer(packed, np.uint8)}
    outputs: dict[str, Any] = {}
    for number, (name, kind, access, _) in enumerate(CONTRACTS[case.op]["slots"], 1):
        value = case.slots.get(name)
        if value is None:
            buffers[number] = Slot(np.zeros(256, np.uint8))
        elif isinstance(value, Weight):
            buffers[number] = read(np.frombuffer(value.on("metal").bytes, np.uint8))
        else:
            dtype = storage(kind, case.precision)
            fresh = access == "write"
            array = np.full(value, POISON[dtype], dtype) if fresh else encode(value, dtype).copy()
            written = 0 if access == "read" else array.nbytes
            buffers[number] = Slot(array, (0, array.nbytes), (0, written))
            if written:
                outputs[name] = array
    done = library.run(
        case.op, groups=groups, threads=threads, buffers=buffers, order=order, seed=1
    )
    decoded = {name: decode(array) for name, array in outputs.items()}
    return done.reports, Result(decoded, 0, case.precision)


def _defines(case: Case) -> dict[str, str]:
    """What the device puts in front of a source."""
    prefix = "".join(word.capitalize() for word in case.op.split("_"))
    wide = case.precision == "float32"
    found = {"LILY_FLOAT32": str(int(wide)), "ACT": "float" if wide else "bfloat"}
    for name, value in all_constants(case.op, case.constants).items():
        found[f"{prefix}_{name}"] = f"{value!r}f" if isinstance(value, float) else f"{value}u"
    for name, value in case.slots.items():
        if isinstance(value, Weight):
            found |= _parts(f"{prefix}_{name}", value)
    return found


def _parts(prefix: str, weight: Weight) -> dict[str, str]:
    """Segments of equal width that follow each other are one part."""
    merged: list[list[int]] = []  # bits, rows
    cols = weight.raw[0][2]
    for bits, rows, *_ in weight.raw:
        if merged and merged[-1][0] == bits:
            merged[-1][1] += rows
        else:
            merged.append([bits, rows])
    text, first, at = "", 0, 0
    for bits, rows in merged:
        affine = at + _aligned(rows * cols * bits // 8)
        text += f" P({first}u, {rows}u, {bits}u, {at}u, {affine}u)"
        first += rows
        at = affine + (_aligned(rows * cols // 64 * 4) if bits != 16 else 0)
    return {
        f"{prefix}_PARTS(P)": text,
        f"{prefix}_N_PARTS": f"{len(merged)}u",
        f"{prefix}_COLS": f"{cols}u",
        f"{prefix}_EXPERT_BYTES": f"{at}ul",
    }


def _aligned(n: int) -> int:
    return -(-n // 256) * 256
