"""Sessions as files: everything that a session needs to go on, in this process or another.

    8 bytes   magic
    4, 4      version of the format, bytes of the header
    32        SHA-256 of the header
    header    JSON: the model, the place, the bytes of the numbers
    tokens    uint32 each
    numbers   KV rows in use, recurrent state, conv ring, logits, as `_core.Snapshot.visit` has them
    32        SHA-256 of everything before

Numbers are little-endian. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.errors import SessionFileError
from lily.files import show

if TYPE_CHECKING:
    from lily.model import Model

MAGIC: Final = b"lilysess"
VERSION: Final = 1

_START: Final = struct.Struct("<8sII32s")
_DIGEST_BYTES: Final = 32
_MOST_HEADER_BYTES: Final = 1 << 20


def save_session(core: _core.Session, model: Model, path: str | os.PathLike[str]) -> None:
    """Write the session's state to `path`; see `Session.save`."""
    snapshot = core.snapshot()
    header = json.dumps(
        {
            "model": model_fields(model),
            "made_by": _maker(model),
            "context": core.context,
            "position": snapshot.position,
            "prompt_length": snapshot.prompt_length,
            "exact_length": snapshot.exact_length,
            "pending": snapshot.pending,
            "logits": snapshot.has_logits,
            "bytes": _core.Snapshot.payload_bytes(
                model._live_engine(), snapshot.position, snapshot.has_logits
            ),
        }
    ).encode()
    whole = hashlib.sha256()
    with _replacing(Path(path)) as file:

        def write(data: bytes | memoryview) -> None:
            whole.update(data)
            file.write(data)

        write(_START.pack(MAGIC, VERSION, len(header), hashlib.sha256(header).digest()))
        write(header)
        write(snapshot.token_bytes)
        snapshot.visit(lambda numbers: write(numbers.data))
        file.write(whole.digest())


def load_session(path: str | os.PathLike[str], model: Model) -> tuple[_core.Snapshot, int]:
    """The state in a file, and the context of the session that it was."""
    with open(path, "rb") as file:
        return _Reader(Path(path), file, model).read()


def model_fields(model: Model) -> dict[str, Any]:
    """What a session's numbers depend on: a file fits a model for which all of this is the same."""
    config = asdict(model.info.config)
    return {
        "precision": model.info.precision,
        "kv": model.info.kv,
        **{f"config.{name}": json.loads(json.dumps(config[name])) for name in config},
        "weights": model.info.weights_id,
    }


def _maker(model: Model) -> dict[str, Any]:
    """What else the last bits depend on: elsewhere a state is right, but not `exact`."""
    from lily import __version__

    return {
        "lily": __version__,
        "device": model.info.device,
        "ablated": list(model.info.ablated),
    }


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, model: Model) -> None:
        self.path, self.file, self.model = path, file, model
        self.whole = hashlib.sha256()

    def read(self) -> tuple[_core.Snapshot, int]:
        header = self._header()
        for name, expected in model_fields(self.model).items():
            found = _mapping(header.get("model")).get(name)
            if found != expected:
                raise self._error(name, found, show(expected))
        position = self._number(header, "position")
        context = self._number(header, "context", at_least=max(position, 1))
        pending = header.get("pending")
        if pending is not None:
            pending = self._number(header, "pending")
        logits = header.get("logits")
        if not isinstance(logits, bool):
            raise self._error("logits", logits, "true or false")
        engine = self.model._live_engine()
        need = _core.Snapshot.payload_bytes(engine, position, logits)
        if header.get("bytes") != need:
            raise self._error("bytes", header.get("bytes"), str(need))
        size, end = os.fstat(self.file.fileno()).st_size, self.file.tell()
        expected_size = end + 4 * position + need + _DIGEST_BYTES
        if size != expected_size:
            raise SessionFileError(f"{self.path}: {size} bytes, expected {expected_size}")
        exact = self._number(header, "exact_length")
        try:
            snapshot = _core.Snapshot.build(
                engine,
                np.frombuffer(self._take(4 * position), "<u4").astype(np.uint32),
                self._number(header, "prompt_length"),
                exact if header.get("made_by") == _maker(self.model) else 0,
                pending,
                logits,
                self._fill,
            )
        except ValueError as error:
            raise SessionFileError(f"{self.path}: {error}") from None
        if self.file.read(_DIGEST_BYTES + 1) != self.whole.digest():
            raise SessionFileError(f"{self.path}: damaged, its checksum is not that of its content")
        return snapshot, context

    def _header(self) -> Mapping[str, Any]:
        start = self._take(_START.size)
        magic, version, n_bytes, digest = _START.unpack(start)
        if magic != MAGIC:
            raise self._error("first bytes", magic, show(MAGIC))
        if version != VERSION:
            raise self._error("version", version, str(VERSION))
        if n_bytes > _MOST_HEADER_BYTES:
            raise self._error("header bytes", n_bytes, f"at most {_MOST_HEADER_BYTES}")
        text = self._take(n_bytes)
        if hashlib.sha256(text).digest() != digest:
            raise SessionFileError(f"{self.path}: damaged, the checksum of its header differs")
        try:
            return _mapping(json.loads(text))
        except (ValueError, RecursionError):
            raise SessionFileError(f"{self.path}: the header is not JSON") from None

    def _take(self, n_bytes: int) -> bytes:
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise self._truncated()
        self.whole.update(data)
        return data

    def _fill(self, numbers: NDArray[np.uint8]) -> None:
        view = numbers.data
        done = 0
        while done < len(view):
            n = self.file.readinto(view[done:])  # type: ignore[attr-defined]
            if not n:
                raise self._truncated()
            done += n
        self.whole.update(view)

    def _number(self, header: Mapping[str, Any], name: str, at_least: int = 0) -> int:
        value = header.get(name)
        if type(value) is not int or not at_least <= value < 2**31:
            raise self._error(name, value, f"a number from {at_least} on")
        return value

    def _error(self, name: str, found: object, expected: str) -> SessionFileError:
        return SessionFileError(f"{self.path}: {name}: found {show(found)}, expected {expected}")

    def _truncated(self) -> SessionFileError:
        return SessionFileError(f"{self.path}: ends too early after {self.file.tell()} bytes")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end, if no exception comes before. Whenever
    the process or the machine stops, `path` is the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
