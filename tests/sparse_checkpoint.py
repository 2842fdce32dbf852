"""Small checkpoints for tests of the loader: real headers, no tensor data.

A checkpoint is a dict of file name to `Blob`, easy to damage before `write` puts it into a
folder. Data bytes are zeros that the file system need not store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily.config import parse_config
from lily.files import DTYPE_BYTES
from lily.tensor_table import Form, expected_tensors, weight_name

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name in the file → (dtype, shape)."""

INDEX = "model.safetensors.index.json"
END, TURN = 101, 102


@dataclass(frozen=True)
class Blob:
    """The first bytes of a file; zeros follow up to `size`."""

    head: bytes
    size: int


def text_blob(value: object) -> Blob:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Blob(data, len(data))


def config(**changes: Any) -> dict[str, Any]:
    """A nested config.json; `changes` replace fields of its text part."""
    text: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "eos_token_id": END,
    }
    text.update(changes)
    return {"model_type": "qwen3_5_moe", "text_config": text}


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration without nesting."""
    outer = {k: v for k, v in nested.items() if k not in ("text_config", "model_type")}
    return {**nested["text_config"], **outer}


def tensors(
    raw: Mapping[str, Any], form: Form = "mlx", quantised: bool = True, extras: bool = True
) -> Tensors:
    """The tensors of a checkpoint with this config.json, under the names of its form."""
    linears, others = expected_tensors(parse_config(raw), form)
    nested = "text_config" in raw
    root = "language_model.model." if form == "mlx" else "model.language_model."
    if not nested:
        root = "model."
    head = "language_model." if form == "mlx" and nested else ""
    found: Tensors = {}
    for module, shape in linears.items():
        at = head if module == "lm_head" else root
        if not quantised:
            found[at + weight_name(module)] = ("BF16", shape)
            continue
        bits = 8 if module.endswith(("mlp.gate", "shared_expert_gate")) else 4
        lead, width = shape[:-1], shape[-1]
        found[f"{at}{module}.weight"] = ("U32", (*lead, width * bits // 32))
        found[f"{at}{module}.scales"] = ("BF16", (*lead, width // 64))
        found[f"{at}{module}.biases"] = ("BF16", (*lead, width // 64))
    for name, (shape, dtypes) in others.items():
        found[root + name] = (dtypes[-1], shape)
    if extras:
        tower = "vision_tower." if form == "mlx" else "model.visual."
        found[tower + "patch_embed.proj.weight"] = ("BF16", (8, 3, 2, 4, 4))
        found["mtp.fc.weight"] = ("BF16", (64, 128))
    return found


def quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a converter writes: 4 bits, and 8 for what routes."""
    settings: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    root = "language_model.model." if "text_config" in raw else "model."
    for i in range(parse_config(raw).num_hidden_layers):
        for gate in ("mlp.gate", "mlp.shared_expert_gate"):
            settings[f"{root}layers.{i}.{gate}"] = {"group_size": 64, "bits": 8}
    return settings


def pack(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Blob:
    """A safetensors file that holds `tensors` one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = DTYPE_BYTES[dtype]
        for size in shape:
            nbytes *= size
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    return pack_header(header, at)


def pack_header(header: object, n_data: int) -> Blob:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    return Blob(head, len(head) + n_data)


def build(
    raw: dict[str, Any] | None = None,
    form: Form = "mlx",
    *,
    quantised: bool | None = None,
    shards: int = 1,
    held: Tensors | None = None,
) -> dict[str, Blob]:
    """All files of a checkpoint.

    Args:
        raw: config.json without quantisation settings.
        quantised: 4-bit; without it, as is usual for the form.
        shards: files to spread the tensors over; more than one adds an index.
        held: the tensors, if not those that the configuration demands.
    """
    raw = config() if raw is None else raw
    quantised = form == "mlx" if quantised is None else quantised
    held = tensors(raw, form, quantised) if held is None else held
    if quantised:
        settings = quantization(raw)
        raw = {**raw, "quantization": settings, "quantization_config": settings}
    files = {"config.json": text_blob(raw)}
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    placed = {tensor: names[i % shards] for i, tensor in enumerate(held)}
    for name in names:
        files[name] = pack({t: held[t] for t in held if placed[t] == name})
    if shards > 1:
        files[INDEX] = text_blob({"metadata": {"total_size": 1}, "weight_map": placed})
    files["generation_config.json"] = text_blob({"eos_token_id": [TURN, END], "top_k": 20})
    files["tokenizer_config.json"] = text_blob({"eos_token": "<|im_end|>"})
    files["tokenizer.json"] = text_blob(
        {
            "added_tokens": [
                {"id": END, "content": "<|endoftext|>"},
                {"id": TURN, "content": "<|im_end|>"},
            ],
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        }
    )
    files["chat_template.jinja"] = text_blob(b"{{ messages }}")
    return files


def write(folder: Path, files: Mapping[str, Blob]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, blob in files.items():
        with open(folder / name, "wb") as file:
            file.write(blob.head)
            file.truncate(blob.size)
    return folder
