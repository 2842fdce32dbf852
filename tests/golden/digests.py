"""Digests of a checkpoint folder that do not depend on how its files' headers are laid out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from reference.weights import read_table


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def digests(folder: Path) -> dict[str, Any]:
    """Of config.json, of the index, and of the tensors of each layer, with names and shapes."""
    layers: dict[str, Any] = {}
    table = read_table(folder)
    for name in sorted(table):
        parts = name.removeprefix("language_model.").removeprefix("model.").split(".")
        layer = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        tensor = table[name]
        digest = layers.setdefault(layer, hashlib.sha256())
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.read().tobytes())
    return {
        "n_tensors": len(table),
        "config": file_digest(folder / "config.json"),
        "index": file_digest(folder / "model.safetensors.index.json"),
        "tensors": {layer: digest.hexdigest()[:16] for layer, digest in layers.items()},
    }
