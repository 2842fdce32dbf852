"""Writing a checkpoint folder: safetensors files filled in any order, and all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from lily.errors import Error, InternalError
from lily.files import DTYPE_BYTES

_SPARE_BYTES: Final = 64 << 20  # headers, configuration, tokenizer


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: name, safetensors' word for its type, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def split(tensors: Sequence[NewTensor], limit: int) -> list[list[NewTensor]]:
    """Shards of at most `limit` bytes, in order; a larger tensor has one of its own."""
    shards: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


class TensorWriter:
    """Safetensors files of known content, filled piece by piece from any thread.

    Args:
        folder: where they go.
        tensors: in the order in which they are split into files.
        limit: most tensor bytes in one file.
        form: "mlx" or "pt", as the header's metadata says it.

    Attributes:
        weight_map: tensor name → file name.
    """

    def __init__(self, folder: Path, tensors: Sequence[NewTensor], limit: int, form: str) -> None:
        self.weight_map: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}  # descriptor, first byte
        self._files: list[int] = []
        self._lock = threading.Lock()
        self._missing = sum(t.nbytes for t in tensors)
        shards = split(tensors, limit)
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._start(folder / name, shard, form)

    def _start(self, path: Path, shard: Sequence[NewTensor], form: str) -> None:
        """Write the header and give the file its size."""
        header: dict[str, Any] = {"__metadata__": {"format": form}}
        at = 0
        places = []
        for tensor in sorted(shard, key=lambda t: -DTYPE_BYTES[t.dtype]):  # all aligned
            span = [at, at + tensor.nbytes]
            header[tensor.name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span
            }  # fmt: skip
            places.append((tensor.name, at))
            at = span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._files.append(file)
        _write(file, len(text).to_bytes(8, "little") + text, 0)
        start = 8 + len(text)
        os.ftruncate(file, start + at)
        for name, offset in places:
            self._places[name] = (file, start + offset)
            self.weight_map[name] = path.name

    def write(self, name: str, offset: int, data: NDArray[Any]) -> None:
        """Put a contiguous array at byte `offset` of tensor `name`."""
        file, start = self._places[name]
        _write(file, data.data, start + offset)
        with self._lock:
            self._missing -= data.nbytes

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def check_complete(self) -> None:
        """Raises InternalError if bytes were left out."""
        if self._missing:
            raise InternalError(f"tensor_files.py: {self._missing} bytes were not written")


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        n = os.pwrite(file, left, offset)
        left, offset = left[n:], offset + n


def write_json(path: Path, value: object, indent: int) -> None:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")


def check_new(out: Path) -> None:
    """Raises Error if something is there already, or its parent is not."""
    if os.path.lexists(out):
        raise Error(f"{out}: exists, expected the name of a new folder")
    if not os.path.isdir(out.parent):
        raise Error(f"{out.parent}: no such folder")


@contextlib.contextmanager
def new_folder(out: Path, n_bytes: int) -> Iterator[Path]:
    """A folder to fill, which appears as `out` when the block ends.

    It is a sibling with a hidden name until then. Whatever ends the block early, Ctrl-C included,
    removes it. What is in it is on the disk before it is renamed.

    Args:
        out: a name that is free.
        n_bytes: what will be written, about.

    Raises:
        Error: `out` exists, there is too little room, or the disk refuses.
    """
    check_new(out)
    free = shutil.disk_usage(out.parent).free
    if free < n_bytes + _SPARE_BYTES:
        raise Error(
            f"{out}: {free / 1e9:.2f} GB free on the disk,"
            f" expected {(n_bytes + _SPARE_BYTES) / 1e9:.2f} GB"
        )
    hidden = out.parent / f".lily-{secrets.token_hex(8)}"
    try:
        hidden.mkdir()
        yield hidden
        for path in (*hidden.iterdir(), hidden):
            _sync(path)
        check_new(out)
        hidden.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise Error(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
