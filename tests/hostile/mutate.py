"""Seeded damage to checkpoints: the same seed damages the same files in the same way.

The engine works on a checkpoint as `sparse_checkpoint` holds it and knows nothing of who will
read the result, so any loader can be fed from it:

    for seed in range(n):
        case = mutate(files, seed)
        sparse_checkpoint.write(folder, case.files)

Half of the cases damage bytes; the others stay well-formed and lie: JSON with a value, key or
offset replaced, headers whose ranges overlap or overflow, an index that points elsewhere, files
missing or exchanged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparse_checkpoint import Blob

EDGES = [
    0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 127, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**48, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 10**400,
]  # fmt: skip
VALUES: list[Any] = [
    *EDGES, 0.0, -0.0, 0.5, 1e-320, 1e308, -1.5, True, False, None, "", "x", "default", "..",
    "../../x.safetensors", "/dev/zero", "a\0b", "\ud800", "é" * 50, "x" * 5000, [], {}, [[]], [{}],
    [0, 0], [0, 2**63], [2**32, 2**32], [1] * 40, {"bits": 2}, {"bits": 8}, {"mode": "mxfp4"},
    {"group_size": 32}, {"a": {"a": {"a": {}}}},
]  # fmt: skip
# Text that Python's JSON writer would not produce.
LITERALS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "0x10", "01", "1.", "nul",
    "[" * 70 + "]" * 70, "[" * 3000, '{"a":' * 3000, '{"a":1,"a":2}', '"\\ud800\\ud800"', "'x'",
]  # fmt: skip
MARK = "\u2603replace me\u2603"


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint: `what` tells how, `files` is the result."""

    seed: int
    what: str
    files: dict[str, Blob]


def mutate(files: Mapping[str, Blob], seed: int) -> Case:
    """Damage one to three things in a copy of `files`."""
    rng = random.Random(seed)
    damaged, told = dict(files), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not damaged:
            break
        how = rng.choice(MUTATIONS)
        told.append(how(damaged, rng))
    return Case(seed, "; ".join(told), damaged)


# --- Bytes --------------------------------------------------------------------------------------


def damage_bytes(files: dict[str, Blob], rng: random.Random) -> str:
    name = rng.choice(sorted(files))
    blob = files[name]
    head = bytearray(blob.head)
    n = rng.randint(1, 4)
    for _ in range(n):
        at = rng.randrange(len(head)) if head else 0
        what = rng.randrange(6)
        if what == 0 and head:
            head[at] ^= 1 << rng.randrange(8)
        elif what == 1 and head:
            head[at] = rng.choice(b'{}[]",:0123456789-.eE\\nutf \x00\xff')
        elif what == 2:
            head[at:at] = rng.randbytes(rng.randint(1, 8))
        elif what == 3:
            del head[at : at + rng.randint(1, 16)]
        elif what == 4:
            part = head[at : at + rng.randint(1, 64)]
            to = rng.randrange(len(head) + 1)
            head[to:to] = part
        else:
            head[at : at + 1] = rng.choice(LITERALS).encode()
    size = blob.size if rng.random() < 0.5 else blob.size + len(head) - len(blob.head)
    files[name] = Blob(bytes(head), max(size, len(head)))
    return f"{name}: {n} damaged bytes"


def cut(files: dict[str, Blob], rng: random.Random) -> str:
    name = rng.choice(sorted(files))
    blob = files[name]
    size = rng.choice((0, 1, 7, 8, 9, rng.randrange(blob.size + 1), blob.size - 1))
    size = max(size, 0)
    files[name] = Blob(blob.head[:size], size)
    return f"{name}: cut to {size} bytes"


def grow(files: dict[str, Blob], rng: random.Random) -> str:
    name = rng.choice(sorted(files))
    extra = rng.choice((1, 8, 4096, 1 << 20))
    files[name] = replace(files[name], size=files[name].size + extra)
    return f"{name}: {extra} bytes more"


def header_length(files: dict[str, Blob], rng: random.Random) -> str:
    name = _weights(files, rng)
    if name is None:
        return cut(files, rng)
    blob = files[name]
    true = int.from_bytes(blob.head[:8], "little")
    length = rng.choice(
        (0, 1, 2, true - 1, true + 1, true + 8, blob.size - 8, blob.size - 7, 100_000_000,
         100_000_001, 2**31, 2**63, 2**64 - 1, 2**64 - 8, rng.randrange(2**64))
    ) % 2**64  # fmt: skip
    files[name] = replace(blob, head=length.to_bytes(8, "little") + blob.head[8:])
    return f"{name}: header length {length}"


# --- Well-formed lies ---------------------------------------------------------------------------


def lie_in_json(files: dict[str, Blob], rng: random.Random) -> str:
    """Change one place of a JSON document, headers included."""
    name = rng.choice(sorted(files))
    value = _document(files[name], name)
    if not isinstance(value, dict | list):
        return damage_bytes(files, rng)
    told = _change(value, rng)
    text = json.dumps(value).replace(json.dumps(MARK), rng.choice(LITERALS))
    files[name] = _rewritten(files[name], name, text.encode())
    return f"{name}: {told}"


def lie_in_ranges(files: dict[str, Blob], rng: random.Random) -> str:
    """Offsets and shapes of one or two tensors: moved, exchanged, overlapping, overflowing."""
    name = _weights(files, rng)
    header = _document(files[name], name) if name else None
    if name is None or not isinstance(header, dict):
        return cut(files, rng)
    entries = [
        v for v in header.values()
        if isinstance(v, dict) and isinstance(v.get("data_offsets"), list) and "shape" in v
    ]  # fmt: skip
    if not entries:
        return cut(files, rng)
    one, other = rng.choice(entries), rng.choice(entries)
    what = rng.randrange(8)
    if what == 0:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif what == 1:
        one["data_offsets"] = list(other["data_offsets"])
    elif what == 2:
        shift = rng.choice((1, -1, 2, 64, -64, 2**31, 2**63))
        one["data_offsets"] = [_number(x) + shift for x in one["data_offsets"]]
    elif what == 3:
        one["data_offsets"] = [rng.choice(EDGES), rng.choice(EDGES)]
    elif what == 4:
        one["shape"] = [rng.choice(EDGES) for _ in range(rng.randrange(6))]
    elif what == 5:
        one["shape"] = [2**32, 2**32, *(one["shape"] if isinstance(one["shape"], list) else [])]
    elif what == 6:
        one["shape"], other["shape"] = other["shape"], one["shape"]
    else:
        one["dtype"] = rng.choice(("F32", "BF16", "U32", "F16", "I8", "F4", "", "bf16", "F64", 1))
    files[name] = _rewritten(files[name], name, json.dumps(header).encode())
    return f"{name}: ranges {what}"


def lie_in_names(files: dict[str, Blob], rng: random.Random) -> str:
    """Rename, drop or repeat a tensor, in the header only or in the index only."""
    name = _weights(files, rng)
    header = _document(files[name], name) if name else None
    if name is None or not isinstance(header, dict) or not header:
        return cut(files, rng)
    old = rng.choice(sorted(header))
    new = rng.choice(
        (old + ".scales", "model." + old, old.replace("layers.0", "layers.1"), "mtp." + old,
         old.replace("language_model.model", "model.language_model"), "x" * 600, "", "a\0b",
         old.replace("weight", "bias"), "vision_tower." + old, "\ud800")
    )  # fmt: skip
    if rng.random() < 0.3:
        del header[old]
        new = "nothing"
    elif rng.random() < 0.5:
        header = {new if k == old else k: v for k, v in header.items()}
    else:
        header[new] = header[old]
    files[name] = _rewritten(files[name], name, json.dumps(header).encode())
    return f"{name}: {old} → {new[:40]!r}"


def lie_about_files(files: dict[str, Blob], rng: random.Random) -> str:
    one, other = rng.choice(sorted(files)), rng.choice(sorted(files))
    what = rng.randrange(4)
    if what == 0:
        del files[one]
        return f"{one}: removed"
    if what == 1:
        files[one], files[other] = files[other], files[one]
        return f"{one} ↔ {other}"
    if what == 2:
        new = rng.choice(("model-2.safetensors", "model.safetensors", "x.safetensors"))
        files[new] = files[one]
        return f"{one} copied to {new}"
    files[one] = Blob(b"", rng.choice((0, 8, 4096)))
    return f"{one}: zeros"


MUTATIONS: list[Callable[[dict[str, Blob], random.Random], str]] = [
    damage_bytes, damage_bytes, damage_bytes, damage_bytes, cut, grow, header_length,
    lie_in_json, lie_in_json, lie_in_json, lie_in_ranges, lie_in_ranges, lie_in_names,
    lie_about_files,
]  # fmt: skip


def _weights(files: Mapping[str, Blob], rng: random.Random) -> str | None:
    names = sorted(name for name in files if name.endswith(".safetensors"))
    return rng.choice(names) if names else None


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _document(blob: Blob, name: str) -> Any:
    """The JSON inside a file, None if there is none (any more)."""
    data = blob.head
    if name.endswith(".safetensors"):
        data = data[8 : 8 + int.from_bytes(data[:8], "little")]
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _rewritten(blob: Blob, name: str, text: bytes) -> Blob:
    """The file with another document, its data (and, for a header, its length) kept right."""
    if not name.endswith(".safetensors"):
        return Blob(text, len(text))
    head = len(text).to_bytes(8, "little") + text
    return Blob(head, max(len(head), blob.size + len(head) - len(blob.head)))


def _change(value: Any, rng: random.Random) -> str:
    """Walk to a random place and put a hostile value there, or add, drop or repeat a key."""
    path: list[str] = []
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            if isinstance(value, dict):
                value["x"] = rng.choice(VALUES)
            else:
                value.append(rng.choice(VALUES))
            return "/".join(path) + " filled"
        key = rng.choice(keys)
        path.append(str(key)[:40])
        inner = value[key]
        if isinstance(inner, dict | list) and rng.random() < 0.8:
            value = inner
            continue
        what = rng.randrange(10)
        if what < 5:
            value[key] = rng.choice(VALUES)
        elif what == 5:
            value[key] = MARK
        elif what == 6:
            del value[key]
        elif what == 7:
            value[key] = value[rng.choice(keys)]
        elif isinstance(inner, int):
            value[key] = inner + rng.choice((-1, 1, 32, 64, 2**32))
        elif isinstance(value, dict):
            value[rng.choice(("", "bits", "model_type", "text_config", str(key) + "x"))] = inner
        else:
            value.append(inner)
        return "/".join(path) + f" changed ({what})"
