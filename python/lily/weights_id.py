"""Which weights a checkpoint holds, told without reading them all."""

from __future__ import annotations

import hashlib
import json

from lily.checkpoint import Checkpoint

_SAMPLE_BYTES = 256


def weights_id(checkpoint: Checkpoint) -> str:
    """A hash of the tensor table (names, types, shapes, places, formats), of the files' sizes, and
    of a sample of bytes from the middle of each tensor. The same weights in other files have
    another one; weights that differ nowhere in the samples have the same."""
    whole = hashlib.sha256()
    tensors = sorted(checkpoint.tensors.items())
    table = [[name, t.file, t.offset, t.nbytes, t.dtype, t.shape] for name, t in tensors]
    formats = sorted((name, *form) for name, form in checkpoint.formats.items())
    sizes = [path.stat().st_size for path in checkpoint.files]
    whole.update(json.dumps([checkpoint.form, table, formats, sizes]).encode())
    files = [open(path, "rb", buffering=0) for path in checkpoint.files]  # noqa: SIM115
    try:
        for _, t in tensors:
            n = min(t.nbytes, _SAMPLE_BYTES)
            files[t.file].seek(t.offset + (t.nbytes - n) // 2)
            whole.update(files[t.file].read(n))
    finally:
        for file in files:
            file.close()
    return whole.hexdigest()
