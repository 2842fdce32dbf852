"""Bounded readers of files nobody vouches for: JSON and safetensors headers.

Every reader here takes a file that may be truncated, corrupted or hostile and either
returns plain Python values or raises `CheckpointError`. Sizes, nesting and the number of
values are limited before anything is built from them, and tensor data is never read.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lily.errors import CheckpointError

MAX_JSON_BYTES: Final = 100_000_000
"""Largest JSON document; the safetensors format caps its header at the same size."""

# A short document can describe many objects ("[],[],…"), so the number of values is
# limited too. A tokenizer of 250,000 tokens has about 800,000 commas and 250,000 lists;
# a header of 100,000 tensors has fewer commas. The worst document within these limits
# takes seconds and about half a gigabyte.
_MAX_COMMAS: Final = 2_000_000
_MAX_CONTAINERS: Final = 1_000_000
_MAX_DEPTH: Final = 64

_MAX_RANK: Final = 8
_MAX_DIMENSION: Final = 1 << 48
_MAX_NAME: Final = 512

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of each safetensors dtype that may appear in a file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies, as its file's header says and the file's size allows.

    Attributes:
        name: the tensor's name.
        file: index into the checkpoint's `files`.
        offset: first byte, counted from the start of the file; any alignment.
        nbytes: product of `shape` times the dtype's size.
        dtype: safetensors' word for it, a key of `DTYPE_BYTES`.
        shape: as stored.
    """

    name: str
    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def show(value: object, limit: int = 80) -> str:
    """A value as an error message prints it: escaped, and short whatever it holds."""
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        if len(value) > 8 or any(isinstance(v, list | tuple | dict) for v in value):
            return f"a list of {len(value)} values"
        text = "[" + ", ".join(show(v, 20) for v in value) + "]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int) and value.bit_length() > 256:
        text = f"an integer of {value.bit_length()} bits"
    elif isinstance(value, str):
        text = repr(value[: limit + 1])
    else:
        text = repr(value)
    return text if len(text) <= limit + 2 else text[:limit] + "…"


def is_int(value: object) -> bool:
    """True for a JSON integer; `true` and `false` are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _open_regular(path: Path) -> tuple[int, int]:
    """Open `path` for reading: (descriptor, size). A pipe or device would block or never end."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer before fstat can refuse it.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {_reason(error)}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: not a regular file")
    return fd, info.st_size


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read(fd: int, n_bytes: int, path: Path) -> bytes:
    parts, left = [], n_bytes
    while left:
        try:
            part = os.read(fd, min(left, 1 << 24))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None
        if not part:
            raise CheckpointError(
                f"{path}: ends after {n_bytes - left} bytes, expected {n_bytes} more bytes"
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _NotJson(f"key {show(key)} appears twice in one object")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotJson(f"number {text[:40]} is too large")
    return value


def _no_constant(text: str) -> float:
    raise _NotJson(f"{text} is not a JSON number")


class _NotJson(Exception):
    """What is wrong with a document; `parse_json` adds the place."""


def parse_json(data: bytes, where: str) -> Any:
    """Parse a JSON document from a file that nobody vouches for.

    Refused besides syntax errors: more than `MAX_JSON_BYTES`, absurdly many values,
    nesting deeper than 64, a key twice in one object, NaN and infinities, text that is
    not UTF-8.

    Args:
        data: the document.
        where: begins the error message.

    Raises:
        CheckpointError: as above.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{where}: {len(data)} bytes, expected at most {MAX_JSON_BYTES}")
    if data.count(b",") > _MAX_COMMAS:
        raise CheckpointError(f"{where}: more than {_MAX_COMMAS} values")
    if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
        raise CheckpointError(f"{where}: more than {_MAX_CONTAINERS} lists and objects")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON at character {error.pos}: {error.msg}") from None
    except _NotJson as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise CheckpointError(f"{where}: holds an integer of thousands of digits") from None
    _check_depth(value, where)
    return value


def _check_depth(value: Any, where: str) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises:
        CheckpointError: the file is missing, no regular file, or refused by `parse_json`.
    """
    fd, size = _open_regular(path)
    try:
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}")
        data = _read(fd, size, path)
    finally:
        os.close(fd)
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {show(value)}, expected an object")
    return value


def read_header(path: Path, file: int = 0) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file and check it against the file's size.

    The format's own rules hold: ranges must not overlap, and together they must cover the
    data exactly. So neither a hole nor trailing bytes pass: every writer follows this, and
    what breaks it is a damaged or doctored file.

    Args:
        path: the file.
        file: put into each entry's `file`.

    Returns:
        Entries by name, in the order of the header.

    Raises:
        CheckpointError: naming the file, the tensor, what was expected and found.
    """
    fd, size = _open_regular(path)
    try:
        if size < 8:
            raise CheckpointError(f"{path}: {size} bytes, expected a safetensors file")
        length = int.from_bytes(_read(fd, 8, path), "little")
        if length > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: header of {length} bytes, expected at most {MAX_JSON_BYTES}"
            )
        if length > size - 8:
            raise CheckpointError(
                f"{path}: header of {length} bytes, expected at most {size - 8}"
                f" in a file of {size} bytes"
            )
        data = _read(fd, length, path)
    finally:
        os.close(fd)
    if not data.startswith(b"{"):
        raise CheckpointError(f"{path}: header does not begin with an object")
    header = parse_json(data, f"{path}: header")
    start = 8 + length
    entries = {
        name: _entry(name, value, path, file, start, size - start)
        for name, value in header.items()
        if name != "__metadata__"
    }
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: expected an object of texts")
    _check_coverage(entries, path, start, size)
    return entries


def _entry(name: str, value: Any, path: Path, file: int, start: int, room: int) -> TensorEntry:
    where = f"{path.name}: {show(name)[1:-1]}"
    if not name or len(name) > _MAX_NAME:
        raise CheckpointError(f"{where}: a name of {len(name)} characters, expected 1..{_MAX_NAME}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {show(value)}, expected an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise CheckpointError(f"{where}: {key} is missing from the header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: dtype {show(dtype)}, expected one of safetensors' types")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{where}: shape {show(shape)}, expected at most {_MAX_RANK} sizes")
    nbytes = DTYPE_BYTES[dtype]
    for dimension in shape:
        if not is_int(dimension) or not 0 <= dimension <= _MAX_DIMENSION:
            raise CheckpointError(f"{where}: shape {show(shape)}, expected sizes in 0..2^48")
        nbytes *= dimension
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_int, offsets))):
        raise CheckpointError(f"{where}: data_offsets {show(offsets)}, expected two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= room:
        raise CheckpointError(
            f"{where}: bytes {show(begin)} to {show(end)} of the data,"
            f" expected a range within {room} bytes"
        )
    if end - begin != nbytes:
        raise CheckpointError(
            f"{where}: {end - begin} bytes, expected {show(nbytes)} for {dtype} {show(shape)}"
        )
    return TensorEntry(name, file, start + begin, nbytes, dtype, tuple(shape))


def _check_coverage(entries: dict[str, TensorEntry], path: Path, start: int, size: int) -> None:
    position, before = start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        name = show(entry.name)[1:-1]
        if entry.offset < position:
            raise CheckpointError(f"{path.name}: {name}: its bytes overlap those of {before}")
        if entry.offset > position:
            raise CheckpointError(
                f"{path.name}: {name}: {entry.offset - position} bytes between it and {before}"
                " belong to no tensor"
            )
        position, before = entry.offset + entry.nbytes, name
    if position != size:
        raise CheckpointError(
            f"{path.name}: {size} bytes, expected {position} by its header (last: {before})"
        )
