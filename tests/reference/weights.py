"""Read a checkpoint of either form into full-precision arrays under one set of names.

The names are those of an MLX file without its prefix and without `.weight`: `embed_tokens`,
`layers.0.linear_attn.in_proj_qkv`, `layers.0.mlp.switch_mlp.up_proj`, `norm`, `lm_head`.
Values are what the model multiplies by: affine groups are unpacked, norm weights are complete
(a published one is stored less 1), convolutions are [channels, taps], experts are
[expert, out, in].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = NDArray[Any]

# The NumPy type that holds each safetensors type; bf16 stays a bit pattern.
STORED = {"U32": "<u4", "BF16": "<u2", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}

CENTRED = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its header entry, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Array:
        """The stored values in an aligned array; bf16 as uint16."""
        count = math.prod(self.shape)
        kind = np.dtype(STORED[self.dtype])
        return np.fromfile(self.path, kind, count, offset=self.offset).reshape(self.shape)

    def values(self, dtype: DTypeLike) -> Array:
        """The values as `dtype`."""
        raw = self.read()
        return (bf16(raw) if self.dtype == "BF16" else raw).astype(dtype)


def bf16(raw: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bit patterns as float32: the upper half of its bits."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file; `__metadata__` holds its metadata."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    return header


def read_file(path: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file, wherever its data starts."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in read_header(path).items()
        if name != "__metadata__"
    }


def read_table(folder: Path) -> dict[str, Stored]:
    """Every tensor of every safetensors file in `folder`."""
    table: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        table |= read_file(path)
    return table


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def unpack_codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Codes [.., in] of words [.., in·bits/32]; the first code is in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1)


def unpack_affine(
    words: NDArray[np.uint32],
    scales: Array,
    biases: Array,
    bits: int,
    dtype: DTypeLike = np.float32,
) -> Array:
    """w = scale · code + bias, one scale and bias per group of consecutive inputs."""
    codes = unpack_codes(words, bits).astype(dtype)
    grouped = codes.reshape(*scales.shape, -1)
    w: Array = scales.astype(dtype)[..., None] * grouped + biases.astype(dtype)[..., None]
    return w.reshape(codes.shape)


def module_bits(quantization: Mapping[str, Any], module: str) -> int:
    """The code width of a quantised module: its own entry, or the global one."""
    entry = quantization.get(module)
    return int((entry if isinstance(entry, dict) else quantization)["bits"])


def modules(table: Mapping[str, Stored]) -> dict[str, str]:
    """The text modules of a file: canonical name → path in the file."""
    found = {}
    for name in table:
        path = name.removesuffix(".weight").removesuffix(".scales").removesuffix(".biases")
        short = path.removeprefix("language_model.").removeprefix("model.")
        short = short.removeprefix("language_model.")
        if not short.startswith(("mtp.", "visual.", "vision_tower.")):
            found[short] = path
    return found


def load_dequantised(folder: str | Path, dtype: DTypeLike = np.float32) -> dict[str, Array]:
    """All weights of the text model, in full precision under canonical names.

    Args:
        folder: a checkpoint in the MLX or the published form.
        dtype: float32, which holds every unpacked weight exactly, or float64.
    """
    folder = Path(folder)
    table = read_table(folder)
    quantization = read_config(folder).get("quantization", {})
    return dict(named(table, quantization, dtype))


def named(
    table: Mapping[str, Stored], quantization: Mapping[str, Any], dtype: DTypeLike
) -> Iterator[tuple[str, Array]]:
    found = modules(table)
    # Only the published form keeps the convolution's taps last; it also centres norms on 0.
    published = any("conv1d" in p and table[p + ".weight"].shape[-1] != 1 for p in found.values())
    for name, path in found.items():
        last = name.rpartition(".")[2]
        if path + ".scales" in table:
            parts = [table[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
            words, scales, biases = parts[0].read(), parts[1].values(dtype), parts[2].values(dtype)
            yield name, unpack_affine(words, scales, biases, module_bits(quantization, path), dtype)
            continue
        w = table[path if path in table else path + ".weight"].values(dtype)
        if last == "conv1d":
            yield name, w[:, 0, :] if published else w[:, :, 0]
        elif last == "gate_up_proj":
            experts = name.replace("experts.gate_up_proj", "switch_mlp.")
            gate, up = np.split(w, 2, axis=1)
            yield experts + "gate_proj", gate
            yield experts + "up_proj", up
        elif name.endswith(".experts.down_proj"):
            yield name.replace("experts.", "switch_mlp."), w
        elif published and (last in CENTRED or name == "norm"):
            yield name, w + 1
        else:
            yield name, w
