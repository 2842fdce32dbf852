"""From a published checkpoint to MLX's 4-bit form, and back to the published layout.

Rows stream through a few threads, so memory stays small whatever the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from lily.checkpoint import (
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Progress,
    open_checkpoint,
    resolve,
)
from lily.errors import CheckpointError
from lily.files import read_json
from lily.layouts import (
    Dtype,
    Piece,
    Work,
    mlx_config,
    mlx_parameters,
    published_config,
    to_mlx,
    to_published,
)
from lily.tensor_files import TensorWriter, check_new, new_folder, write_json
from lily.tensor_table import parse_quantization

SHARD_BYTES: Final = 5 << 30  # mlx-lm's

_COPIED: Final = (
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    *CHAT_TEMPLATES,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "README.md",
    "LICENSE",
)


def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """Write a published bf16 checkpoint in MLX's form: 4-bit codes in groups of 64.

    Router and shared-expert gate get 8 bits, norm weights become w + 1 in bf16, experts are
    split, the vision tower and the draft head left out. Tensors, index and config.json are those
    of mlx-lm 0.32.2 on a CPU, bit for bit. The tokenizer, chat template, generation_config.json
    and README.md are copied. `out` appears when it is complete; an error or Ctrl-C leaves nothing.

    Source: mlx-lm, `quantize_model`, `save_model` and `save_config` in utils.py, and
    models/qwen3_5_moe.py; MLX, `quantize` in mlx/backend/cpu/quantized.cpp.

    Args:
        source: a folder, or "org/name" on the Hugging Face hub.
        out: name of the new folder, in a folder that exists.
        threads: None is one for each core that this process may use.
        revision: branch, tag or commit of a hub checkpoint.
        offline: open no connection.
        progress: called with ("download" or "quantize", bytes done, bytes in all).

    Returns:
        `out`.

    Raises:
        CheckpointError: the source is wrong, not in bf16, quantised already, or holds NaN or
            infinity; names the tensor or field.
        Error: `out` exists or cannot be written, or the disk has too little room.
        ValueError: an option is out of range.
    """
    out, threads = Path(os.path.expanduser(out)), _threads(threads)
    check_new(out)
    folder, _ = resolve(source, revision, offline, progress)
    checkpoint = open_checkpoint(folder)
    where = str(folder / CONFIG)
    raw = read_json(folder / CONFIG)
    if parse_quantization(raw, where).everywhere is not None:
        raise CheckpointError(
            f"{where}: quantization: found, expected an unquantised checkpoint",
            hint="lily quantize --unpack goes the other way",
        )
    if checkpoint.form != "published":
        raise CheckpointError(f"{folder}: in MLX's form, expected the published one")

    works = list(to_mlx(checkpoint, raw))
    config = mlx_config(checkpoint, raw)
    metadata = {"total_size": _size(works), "total_parameters": mlx_parameters(checkpoint.config)}
    with _new_checkpoint(out, works, "mlx", metadata) as (hidden, writer):
        _run(works, writer, threads, _Counter("quantize", checkpoint.weights_bytes, progress))
        _copy_text_files(folder, hidden)
        write_json(hidden / CONFIG, config, indent=4)
    return out


def unpack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Dtype = "bfloat16",
    threads: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """Write an MLX checkpoint unquantised in the published layout, which transformers loads.

    Experts are fused, norms stored as w - 1; config.json has no quantisation. Only the text model
    is written. `out` appears when it is complete; an error or Ctrl-C leaves nothing.

    Args:
        source: a folder, or "org/name" on the Hugging Face hub.
        out: name of the new folder, in a folder that exists.
        dtype: "float32" keeps what codes, scales and biases stand for, s · c + b with the sum
            rounded to float32, and w - 1 likewise; "bfloat16" rounds that again. lily itself
            loads the latter only.
        threads: None is one for each core that this process may use.
        revision: branch, tag or commit of a hub checkpoint.
        offline: open no connection.
        progress: called with ("download" or "unpack", bytes done, bytes in all).

    Returns:
        `out`.

    Raises:
        CheckpointError: the source is wrong, or in the published form already.
        Error: `out` exists or cannot be written, or the disk has too little room.
        ValueError: an option is out of range.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f'dtype: {dtype!r}, expected "bfloat16" or "float32"')
    out, threads = Path(os.path.expanduser(out)), _threads(threads)
    check_new(out)
    folder, _ = resolve(source, revision, offline, progress)
    checkpoint = open_checkpoint(folder)
    if checkpoint.form != "mlx":
        raise CheckpointError(f"{folder}: in the published form already, expected MLX's")
    raw = read_json(folder / CONFIG)

    works = list(to_published(checkpoint, raw, dtype))
    with _new_checkpoint(out, works, "pt", {"total_size": _size(works)}) as (hidden, writer):
        _run(works, writer, threads, _Counter("unpack", checkpoint.weights_bytes, progress))
        _copy_text_files(folder, hidden)
        write_json(hidden / CONFIG, published_config(raw, dtype), indent=2)
    return out


def _threads(given: int | None) -> int:
    if given is None:
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if given < 1:
        raise ValueError(f"threads: {given}, expected 1 or more")
    return given


def _size(works: Iterable[Work]) -> int:
    return sum(tensor.nbytes for work in works for tensor in work.tensors)


@contextlib.contextmanager
def _new_checkpoint(
    out: Path, works: Sequence[Work], form: str, metadata: dict[str, Any]
) -> Iterator[tuple[Path, TensorWriter]]:
    """A folder under a hidden name and its tensor files; an index is written at the end."""
    with new_folder(out, metadata["total_size"]) as hidden:
        tensors = [tensor for work in works for tensor in work.tensors]
        with contextlib.closing(TensorWriter(hidden, tensors, SHARD_BYTES, form)) as writer:
            yield hidden, writer
            writer.check_complete()
        placed = dict(sorted(writer.weight_map.items()))
        write_json(hidden / INDEX, {"metadata": metadata, "weight_map": placed}, indent=4)


class _Counter:
    """Adds up what is done, and tells the caller."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.progress = what, total, progress
        self.done = 0

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress:
            self.progress(self.what, self.done, self.total)


def _run(works: Iterable[Work], writer: TensorWriter, threads: int, counter: _Counter) -> None:
    """Run all pieces; few wait in line, so that an error or Ctrl-C ends soon."""
    with ThreadPoolExecutor(threads, "lily-convert") as pool:
        running: set[Future[int]] = set()
        for piece in _pieces(works):
            running.add(pool.submit(piece, writer))
            if len(running) >= 4 * threads:
                running = _take_finished(running, counter)
        while running:
            running = _take_finished(running, counter)


def _pieces(works: Iterable[Work]) -> Iterator[Piece]:
    for work in works:
        yield from work.pieces()


def _take_finished(running: set[Future[int]], counter: _Counter) -> set[Future[int]]:
    finished, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        counter.add(future.result())
    return rest


def _copy_text_files(folder: Path, to: Path) -> None:
    for path in (folder / name for name in _COPIED):
        if not path.is_file():
            continue
        try:
            file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        with file, (to / path.name).open("wb") as copy:
            shutil.copyfileobj(file, copy)
