"""The published layout and MLX's: what becomes of each tensor and of config.json.

A `Work` is the tensors that one module of the new checkpoint consists of, and the pieces of work
that fill them. Pieces are independent, so they may run in any order and in any thread.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lily import affine
from lily.affine import F32, GROUP, Bf16, Groups, from_bf16, to_bf16
from lily.checkpoint import Checkpoint
from lily.config import LINEAR_ATTENTION, Config
from lily.errors import CheckpointError
from lily.tensor_files import NewTensor, TensorWriter
from lily.tensor_table import BF16, Format, expected_tensors, weight_name

Dtype = Literal["bfloat16", "float32"]

_PIECE: Final = 1 << 17  # weights of a piece: its temporaries stay in a core's cache

Piece = Callable[[TensorWriter], int]
"""Converts and writes a few rows; returns how many bytes of the source it took."""


class Work(NamedTuple):
    tensors: tuple[NewTensor, ...]
    pieces: Callable[[], Iterator[Piece]]


# The order of mlx-lm's module tree: with it, files are cut between the same tensors.
_ORDER: Final = ("embed_tokens", "layers", "norm", "lm_head")
_LAYER_ORDER: Final = (
    "linear_attn.conv1d", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
    "linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.dt_bias", "linear_attn.A_log",
    "linear_attn.norm", "linear_attn.out_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "input_layernorm", "post_attention_layernorm",
    "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj",
    "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj", "mlp.shared_expert.up_proj",
    "mlp.shared_expert_gate",
)  # fmt: skip


def _place(name: str) -> tuple[int, ...]:
    first, *rest = name.removesuffix(".weight").split(".")
    if not rest:
        return (_ORDER.index(first),)
    return (_ORDER.index(first), int(rest[0]), _LAYER_ORDER.index(".".join(rest[1:])))


def _in_order(config: Config, form: Literal["mlx", "published"]) -> Iterator[tuple[str, bool]]:
    """Every module that is a matrix, and every other tensor: (name, whether it is a matrix)."""
    expected = expected_tensors(config, form)
    for name in sorted([*expected.linears, *expected.others], key=_place):
        yield name, name in expected.linears


def _is_centred(name: str) -> bool:
    """Whether the published form stores this norm's weight less 1."""
    return name.endswith("norm.weight") and ".linear_attn." not in name


def quantized_bits(module: str) -> int:
    return 8 if module.endswith(("mlp.gate", "mlp.shared_expert_gate")) else 4


# Reading rows ------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Which rows of a matrix are those of another: `run` rows of every `step`, from `first` on.

    The fused experts are so: of each expert's 2F rows, F are the gate's.
    """

    run: int
    step: int
    first: int = 0

    def pieces(self, n_rows: int, width: int) -> Iterator[tuple[int, int, int]]:
        """(first row of the narrow matrix, of the wide one, how many) for runs of few rows."""
        most = max(1, _PIECE // width)
        for block in range(n_rows // self.run):
            for at in range(0, self.run, most):
                n = min(most, self.run - at)
                yield block * self.run + at, block * self.step + self.first + at, n


class _Reader:
    """Reads rows of a checkpoint's tensors, in any thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def place(self, name: str) -> str:
        entry = self.checkpoint.tensors[name]
        return f"{self.checkpoint.files[entry.file].name}: {name}"

    def read(self, name: str, first: int, n: int) -> bytes:
        entry = self.checkpoint.tensors[name]
        path = self.checkpoint.files[entry.file]
        parts: list[bytes] = []
        at, end = entry.offset + first, entry.offset + first + n
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                while at < end:
                    part = os.pread(file, end - at, at)
                    if not part:
                        break
                    parts.append(part)
                    at += len(part)
            finally:
                os.close(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if at < end:
            raise CheckpointError(f"{path}: ends at byte {at}, expected {end} or more")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def bf16(self, name: str, row: int, n: int, width: int) -> Bf16:
        data = self.read(name, 2 * row * width, 2 * n * width)
        return np.frombuffer(data, "<u2").reshape(n, width)

    def values(self, name: str) -> F32:
        """A small tensor, whole."""
        entry = self.checkpoint.tensors[name]
        data = self.read(name, 0, entry.nbytes)
        if entry.dtype == "BF16":
            return from_bf16(np.frombuffer(data, "<u2"))
        return np.frombuffer(data, "<f4").astype(np.float32)


def _encode(values: F32, dtype: str) -> NDArray[Any]:
    """Values as a file stores them."""
    return to_bf16(values) if dtype == "BF16" else values.astype("<f4", copy=False)


def _check_finite(reader: _Reader, name: str, values: F32, first: int = 0) -> None:
    """Refuse NaN and infinity; `values` are those of the tensor from the flat index `first` on."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        shape = reader.checkpoint.tensors[name].shape
        at = [int(i) for i in np.unravel_index(first + int(bad[0]), shape)]
        value = float(values.ravel()[bad[0]])
        raise CheckpointError(f"{reader.place(name)}: {value} at {at}, expected finite values")


# Published to MLX --------------------------------------------------------------------------


def to_mlx(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> Iterator[Work]:
    """The works of a 4-bit checkpoint.

    Args:
        checkpoint: in the published form.
        raw: its config.json.
    """
    reader = _Reader(checkpoint)
    rounds = _dtype_of(raw) == "bfloat16"
    linears = expected_tensors(checkpoint.config, "mlx").linears
    for name, is_linear in _in_order(checkpoint.config, "mlx"):
        if is_linear:
            yield _quantized(reader, name, linears[name])
        else:
            yield _small_to_mlx(reader, name, rounds)


def _dtype_of(raw: Mapping[str, Any]) -> object:
    """The type to which mlx-lm converts what it does not quantise, A_log excepted."""
    text = raw.get("text_config")
    nested = text.get("dtype") if isinstance(text, dict) else None
    return raw.get("torch_dtype") or nested


def _quantized(reader: _Reader, module: str, shape: tuple[int, ...]) -> Work:
    path, bits = _mlx_name(module), quantized_bits(module)
    *outer, out, width = shape
    n_rows = out * (outer[0] if outer else 1)
    source, rows = weight_name(module), _Rows(n_rows, n_rows)
    if ".switch_mlp." in module:
        at, _, part = module.rpartition("switch_mlp.")
        source = at + ("experts.down_proj" if part == "down_proj" else "experts.gate_up_proj")
        if part != "down_proj":
            rows = _Rows(out, 2 * out, out if part == "up_proj" else 0)
    words, groups = width * bits // 32, width // GROUP

    def convert(to: int, row: int, n: int, writer: TensorWriter) -> int:
        weights = reader.bf16(source, row, n, width)
        try:
            codes, scales, biases = affine.quantize(weights, bits)
        except affine.NotFiniteError:
            _check_finite(reader, source, from_bf16(weights), row * width)
            raise CheckpointError(
                f"{reader.place(source)}: a group in rows {row} to {row + n - 1} spans more than"
                " float32 does"
            ) from None
        writer.write(path + ".weight", 4 * to * words, codes)
        writer.write(path + ".scales", 2 * to * groups, scales)
        writer.write(path + ".biases", 2 * to * groups, biases)
        return weights.nbytes

    def pieces() -> Iterator[Piece]:
        for piece in rows.pieces(n_rows, width):
            yield functools.partial(convert, *piece)

    return Work(
        (
            NewTensor(path + ".weight", "U32", (*shape[:-1], words)),
            NewTensor(path + ".scales", "BF16", (*shape[:-1], groups)),
            NewTensor(path + ".biases", "BF16", (*shape[:-1], groups)),
        ),
        pieces,
    )


def _small_to_mlx(reader: _Reader, name: str, rounds: bool) -> Work:
    entry = reader.checkpoint.tensors[name]
    shape = entry.shape
    if name.endswith("conv1d.weight"):
        shape = (shape[0], shape[2], shape[1])  # one of the two is 1: the bytes stay
    dtype = entry.dtype if name.endswith("A_log") or not rounds else "BF16"
    tensor = NewTensor(_mlx_name(name), dtype, shape)

    def convert(writer: TensorWriter) -> int:
        values = reader.values(name)
        _check_finite(reader, name, values)
        if _is_centred(name):
            values += np.float32(1)
        writer.write(tensor.name, 0, _encode(values, dtype))
        return entry.nbytes

    return Work((tensor,), lambda: iter([convert]))


def _mlx_name(name: str) -> str:
    """Under the prefix that mlx-lm gives, whether the configuration is nested or not."""
    return f"language_model.{'' if name.startswith('lm_head') else 'model.'}{name}"


def mlx_config(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as mlx-lm writes it."""
    config = copy.deepcopy(dict(raw))
    if stops := checkpoint.generation_config.get("eos_token_id"):
        config["eos_token_id"] = stops
    for key in ("_name_or_path", "vision_config"):
        config.pop(key, None)
    text = _text_config(config)
    if text is config:
        config["model_type"] = "qwen3_5_moe"  # mlx-lm knows this word only, nested or not
    _rename_rope(text, "rope_type", "type")
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for name, is_linear in _in_order(checkpoint.config, "mlx"):
        if is_linear and (bits := quantized_bits(name)) != 4:
            quantization[_mlx_name(name)] = {"group_size": GROUP, "bits": bits}
    config["quantization"] = config["quantization_config"] = quantization
    return dict(sorted(config.items()))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The object that holds the text model's fields: nested, or the whole."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _rename_rope(text: dict[str, Any], old: str, new: str) -> None:
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and old in rope and new not in rope:
        rope[new] = rope.pop(old)


def mlx_parameters(config: Config) -> int:
    """What mlx-lm calls total_parameters: A_log and dt_bias are not counted."""
    n_delta_nets = config.layer_types.count(LINEAR_ATTENTION)
    return config.n_parameters - 2 * n_delta_nets * config.linear_num_value_heads


# MLX to published --------------------------------------------------------------------------


def to_published(checkpoint: Checkpoint, raw: Mapping[str, Any], dtype: Dtype) -> Iterator[Work]:
    """The works of an unquantised checkpoint.

    Args:
        checkpoint: in MLX's form.
        raw: its config.json.
        dtype: of all weights; with "bfloat16", what is stored in float32 stays so.
    """
    reader = _Reader(checkpoint)
    prefix = "model.language_model." if isinstance(raw.get("text_config"), dict) else "model."
    linears = expected_tensors(checkpoint.config, "published").linears
    for name, is_linear in _in_order(checkpoint.config, "published"):
        path = name if name == "lm_head" else prefix + name
        if is_linear:
            tensor = NewTensor(weight_name(path), _WORDS[dtype], linears[name])
            yield _dequantized(reader, name, tensor)
        else:
            yield _small_to_published(reader, name, path, dtype)


_WORDS: Final[Mapping[Dtype, str]] = {"bfloat16": "BF16", "float32": "F32"}


def _dequantized(reader: _Reader, module: str, tensor: NewTensor) -> Work:
    *outer, out, width = tensor.shape
    n_rows = out * (outer[0] if outer else 1)
    sources = [(module, n_rows, _Rows(n_rows, n_rows))]
    if ".mlp.experts." in module:
        at, _, part = module.rpartition("experts.")
        if part == "down_proj":
            sources = [(at + "switch_mlp.down_proj", n_rows, _Rows(n_rows, n_rows))]
        else:
            half = out // 2
            sources = [
                (at + "switch_mlp.gate_proj", n_rows // 2, _Rows(half, out)),
                (at + "switch_mlp.up_proj", n_rows // 2, _Rows(half, out, half)),
            ]
    size = 2 if tensor.dtype == "BF16" else 4

    def convert(source: str, row: int, to: int, n: int, writer: TensorWriter) -> int:
        values, taken = _values(reader, source, row, n, width)
        writer.write(tensor.name, size * to * width, _encode(values, tensor.dtype))
        return taken

    def pieces() -> Iterator[Piece]:
        for source, n, rows in sources:
            for piece in rows.pieces(n, width):
                yield functools.partial(convert, source, *piece)

    return Work((tensor,), pieces)


def _values(reader: _Reader, module: str, row: int, n: int, width: int) -> tuple[F32, int]:
    """Rows of a matrix in float32, and how many bytes they took."""
    stored: Format = reader.checkpoint.formats[module]
    if stored == BF16:
        weights = reader.bf16(module + ".weight", row, n, width)
        return from_bf16(weights), weights.nbytes
    size = width * stored.bits // 8
    codes = np.frombuffer(reader.read(module + ".weight", row * size, n * size), np.uint8)
    groups = Groups(
        codes.reshape(n, size),
        reader.bf16(module + ".scales", row, n, width // GROUP),
        reader.bf16(module + ".biases", row, n, width // GROUP),
    )
    return affine.dequantize(groups, stored.bits), sum(part.nbytes for part in groups)


def _small_to_published(reader: _Reader, name: str, path: str, dtype: Dtype) -> Work:
    entry = reader.checkpoint.tensors[name]
    shape = entry.shape
    if name.endswith("conv1d.weight"):
        shape = (shape[0], shape[2], shape[1])
    tensor = NewTensor(path, entry.dtype if dtype == "bfloat16" else "F32", shape)

    def convert(writer: TensorWriter) -> int:
        values = reader.values(name)
        if _is_centred(name):
            values -= np.float32(1)
        writer.write(path, 0, _encode(values, tensor.dtype))
        return entry.nbytes

    return Work((tensor,), lambda: iter([convert]))


def published_config(raw: Mapping[str, Any], dtype: Dtype) -> dict[str, Any]:
    """config.json without quantisation, its type that of the weights."""
    config = copy.deepcopy(dict(raw))
    text = _text_config(config)
    if text is config:
        config["model_type"] = "qwen3_5_moe_text"  # transformers' word for one that is not nested
    text["dtype"] = dtype
    for place in (config, text):
        for key in ("quantization", "quantization_config"):
            place.pop(key, None)
        for key in ("dtype", "torch_dtype"):
            if key in place:
                place[key] = dtype
    _rename_rope(text, "type", "rope_type")
    return config
