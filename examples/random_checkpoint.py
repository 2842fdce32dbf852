"""Write a random checkpoint of the qwen3_5_moe architecture, for tests and timing.

    python examples/random_checkpoint.py OUT --preset tiny --form mlx --seed 0

Two forms: `mlx`, 4-bit as mlx-community publishes it (router and shared-expert gate at 8 bits),
and `published`, bf16 with the names, fused experts and zero-centred norms of the model's authors.
The two are independent models: neither is a conversion of the other.

Weights are untrained. Their scales make every gate, decay and router vary, so arithmetic can be
checked; text quality cannot. Each tensor is a function of (seed, name) alone, computed from raw
generator bits with exactly rounded operations: any NumPy version and any machine writes the same
bytes. Tensors are streamed, so memory stays small whatever the preset.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from text_files import Text, byte_tokens, write_json

Form = Literal["mlx", "published"]
Kind = Literal["linear", "norm", "head_norm", "conv", "a_log", "dt_bias", "vision"]

GROUP = 64
CHUNK = 1 << 21  # raw 64-bit draws per write: 16 MiB
SHARD_BYTES = 4 * 10**9
BYTES = {"U32": 4, "F32": 4, "BF16": 2}


@dataclass(frozen=True)
class Dims:
    """Sizes of one model; `config` gives them the names of config.json."""

    hidden: int
    layers: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    lin_k_heads: int
    lin_v_heads: int
    lin_k_dim: int
    lin_v_dim: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    conv_kernel: int = 4
    interval: int = 4

    @property
    def conv_channels(self) -> int:
        return 2 * self.lin_k_heads * self.lin_k_dim + self.lin_v_heads * self.lin_v_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


PRESETS: dict[str, Dims] = {
    # Every code path, in milliseconds.
    "tiny": Dims(
        hidden=128, layers=8, vocab=512, q_heads=4, kv_heads=2, head_dim=64,
        lin_k_heads=2, lin_v_heads=4, lin_k_dim=64, lin_v_dim=64,
        experts=8, top_k=2, expert_width=64, shared_width=64,
    ),
    # The head sizes of the released model.
    "heads": Dims(
        hidden=256, layers=4, vocab=1024, q_heads=16, kv_heads=2, head_dim=256,
        lin_k_heads=4, lin_v_heads=8, lin_k_dim=128, lin_v_dim=128,
        experts=16, top_k=4, expert_width=128, shared_width=128,
    ),
    # About a fifth of the released model's work per token, at full width.
    "mid": Dims(
        hidden=2048, layers=8, vocab=49664, q_heads=16, kv_heads=2, head_dim=256,
        lin_k_heads=16, lin_v_heads=32, lin_k_dim=128, lin_v_dim=128,
        experts=64, top_k=8, expert_width=512, shared_width=512,
    ),
    # The table of Qwen3.6-35B-A3B: 19.5 GB in the mlx form.
    "real": Dims(
        hidden=2048, layers=40, vocab=248320, q_heads=16, kv_heads=2, head_dim=256,
        lin_k_heads=16, lin_v_heads=32, lin_k_dim=128, lin_v_dim=128,
        experts=256, top_k=8, expert_width=512, shared_width=512,
    ),
}  # fmt: skip


# A few byte-pair merges, so that encoding is more than a look-up; "Ġ" stands for a space.
MERGES = ["h e", "Ġ t", "Ġt he", "i n", "r e", "o n", "Ġ a", "Ġa n", "in g", "e r"]
TEXT = Text(byte_tokens() + [merge.replace(" ", "") for merge in MERGES], MERGES)


# --- Architecture -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One module of the text model, before a form gives it file names."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "linear"
    gain: float = 1.0  # of a linear map: standard deviation times sqrt(inputs)
    bits: int = 4


def architecture(d: Dims, form: Form, tied: bool) -> Iterator[Part]:
    """Every module, named as in an MLX file without prefix and `.weight`."""
    yield Part("embed_tokens", (d.vocab, d.hidden), gain=math.sqrt(d.hidden))
    for layer in range(d.layers):
        yield from block(d, form, f"layers.{layer}.", d.is_attention(layer))
    yield Part("norm", (d.hidden,), "norm")
    if not tied:
        yield Part("lm_head", (d.vocab, d.hidden))


def block(d: Dims, form: Form, at: str, attention: bool) -> Iterator[Part]:
    yield Part(at + "input_layernorm", (d.hidden,), "norm")
    yield from (
        gated_attention(d, at + "self_attn.") if attention else delta_net(d, at + "linear_attn.")
    )
    yield Part(at + "post_attention_layernorm", (d.hidden,), "norm")
    yield from moe(d, form, at + "mlp.")


def gated_attention(d: Dims, at: str) -> Iterator[Part]:
    q, kv = d.q_heads * d.head_dim, d.kv_heads * d.head_dim
    yield Part(at + "q_proj", (2 * q, d.hidden))
    yield Part(at + "k_proj", (kv, d.hidden))
    yield Part(at + "v_proj", (kv, d.hidden))
    yield Part(at + "o_proj", (d.hidden, q), gain=0.5)
    yield Part(at + "q_norm", (d.head_dim,), "norm")
    yield Part(at + "k_norm", (d.head_dim,), "norm")


def delta_net(d: Dims, at: str) -> Iterator[Part]:
    v = d.lin_v_heads * d.lin_v_dim
    yield Part(at + "in_proj_qkv", (d.conv_channels, d.hidden))
    yield Part(at + "in_proj_z", (v, d.hidden))
    yield Part(at + "in_proj_a", (d.lin_v_heads, d.hidden))
    yield Part(at + "in_proj_b", (d.lin_v_heads, d.hidden))
    yield Part(at + "conv1d", (d.conv_channels, d.conv_kernel), "conv")
    yield Part(at + "A_log", (d.lin_v_heads,), "a_log")
    yield Part(at + "dt_bias", (d.lin_v_heads,), "dt_bias")
    yield Part(at + "norm", (d.lin_v_dim,), "head_norm")
    yield Part(at + "out_proj", (d.hidden, v), gain=0.5)


def moe(d: Dims, form: Form, at: str) -> Iterator[Part]:
    e, f, s = d.experts, d.expert_width, d.shared_width
    yield Part(at + "gate", (e, d.hidden), gain=2.0, bits=8)
    if form == "mlx":
        yield Part(at + "switch_mlp.gate_proj", (e, f, d.hidden))
        yield Part(at + "switch_mlp.up_proj", (e, f, d.hidden))
        yield Part(at + "switch_mlp.down_proj", (e, d.hidden, f), gain=0.5)
    else:
        yield Part(at + "experts.gate_up_proj", (e, 2 * f, d.hidden))
        yield Part(at + "experts.down_proj", (e, d.hidden, f), gain=0.5)
    yield Part(at + "shared_expert.gate_proj", (s, d.hidden))
    yield Part(at + "shared_expert.up_proj", (s, d.hidden))
    yield Part(at + "shared_expert.down_proj", (d.hidden, s), gain=0.5)
    yield Part(at + "shared_expert_gate", (1, d.hidden), bits=8)


def draft_head(d: Dims) -> Iterator[Part]:
    """The multi-token prediction head of a published checkpoint, which plain decoding skips."""
    yield Part("mtp.fc", (d.hidden, 2 * d.hidden))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Part("mtp." + name, (d.hidden,), "norm")
    yield from block(d, "published", "mtp.layers.0.", True)


# --- Random values ------------------------------------------------------------------------------


def draws(key: str, n_bytes: int) -> Iterator[NDArray[np.uint64]]:
    """`n_bytes` (a multiple of 8) of raw generator output, in chunks."""
    entropy = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    bits = np.random.PCG64(entropy)
    left = n_bytes // 8
    while left:
        n = min(left, CHUNK)
        yield bits.random_raw(n).astype("<u8", copy=False)
        left -= n


def words(key: str, n: int) -> NDArray[np.uint32]:
    """`n` raw 32-bit words as one array."""
    return np.concatenate(list(draws(key, 8 * ((n + 1) // 2)))).view("<u4")[:n]


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 values to bf16, to nearest even."""
    u = x.view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> 16) & np.uint32(1))) >> 16).astype("<u2")


def from_bf16(u: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (u.astype(np.uint32) << 16).view(np.float32)


def bell_table(mean: float, std: float) -> NDArray[np.uint16]:
    """bf16 value of each 16-bit draw: the sum of its bytes, shifted and scaled."""
    draw = np.arange(1 << 16, dtype=np.int32)
    centred = ((draw & 255) + (draw >> 8) - 255).astype(np.float32)
    step = std / math.sqrt(2 * (256**2 - 1) / 12)
    return to_bf16(centred * np.float32(step) + np.float32(mean))


def bell(key: str, n: int, mean: float, std: float) -> Iterator[NDArray[np.uint16]]:
    """`n` bf16 values of a triangular distribution, in chunks."""
    table = bell_table(mean, std)
    left = n
    for raw in draws(key, 8 * ((n + 3) // 4)):
        index = raw.view("<u2")[:left]
        left -= index.size
        yield table[index]


def uniform(key: str, n: int, low: float, high: float) -> NDArray[np.float32]:
    unit = (words(key, n) >> 8).astype(np.float32) * np.float32(2.0**-24)
    return np.float32(low) + unit * np.float32(high - low)


def scales_and_biases(
    key: str, groups: int, bits: int, std: float
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """bf16 scale and bias of each group of uniform codes, for weights of mean 0 and `std`.

    Half of the scales are negative, and group means differ from zero, so that neither the sign
    of a scale nor the sum over a group can be left out unnoticed.
    """
    raw = words(key, groups)
    code_std = math.sqrt((4**bits - 1) / 12)
    step = np.float32(std / code_std / math.sqrt(1 + 1 / 12))
    size = np.float32(0.5) + ((raw >> 1) & 0xFFF).astype(np.float32) * np.float32(2.0**-12)
    sign = np.where(raw & 1, np.float32(-1), np.float32(1))
    scale = to_bf16(sign * size * step)
    middle = np.float32((2**bits - 1) * 0.4) + (raw >> 20).astype(np.float32) * np.float32(
        (2**bits - 1) * 0.2 * 2.0**-12
    )
    return scale, to_bf16(-from_bf16(scale) * middle)


# --- Tensors of a file --------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: what the header says, and its data in chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterator[NDArray[Any]]]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def tensors(part: Part, path: str, key: str, form: Form, a_log: str) -> Iterator[Tensor]:
    """What a file in `form` stores for `part` under `path`."""
    n = math.prod(part.shape)
    fused = ".experts." in part.name
    name = path if part.kind in ("a_log", "dt_bias") or fused else path + ".weight"
    if part.kind == "linear":
        std = part.gain / math.sqrt(part.shape[-1])
        if form == "mlx":
            yield from quantised(part, path, key, std)
        else:
            yield Tensor(name, "BF16", part.shape, lambda: bell(key, n, 0.0, std))
    elif part.kind == "a_log":
        value = uniform(key, n, -2.5, 0.75)
        if a_log == "float32":
            yield Tensor(name, "F32", part.shape, lambda: iter([value.astype("<f4")]))
        else:
            yield Tensor(name, "BF16", part.shape, lambda: iter([to_bf16(value)]))
    elif part.kind == "dt_bias":
        yield Tensor(name, "BF16", part.shape, lambda: iter([to_bf16(uniform(key, n, -4.0, 1.0))]))
    elif part.kind == "conv":
        channels, taps = part.shape
        shape = (channels, taps, 1) if form == "mlx" else (channels, 1, taps)
        yield Tensor(name, "BF16", shape, lambda: bell(key, n, 0.0, 0.5))
    elif part.kind == "vision":
        yield Tensor(name, "BF16", part.shape, lambda: bell(key, n, 0.0, 0.02))
    else:
        mean = 0.0 if part.kind == "norm" and form == "published" else 1.0
        yield Tensor(name, "BF16", part.shape, lambda: bell(key, n, mean, 0.1))


def quantised(part: Part, path: str, key: str, std: float) -> Iterator[Tensor]:
    *rows, inputs = part.shape
    if inputs % GROUP:
        raise ValueError(f"{part.name}: {inputs} inputs, expected a multiple of {GROUP}")
    packed = (*rows, inputs * part.bits // 32)
    grouped = (*rows, inputs // GROUP)
    groups = math.prod(grouped)

    def affine(which: int) -> Iterator[NDArray[np.uint16]]:
        yield scales_and_biases(key + "/affine", groups, part.bits, std)[which]

    yield Tensor(path + ".weight", "U32", packed, lambda: draws(key, 4 * math.prod(packed)))
    yield Tensor(path + ".scales", "BF16", grouped, lambda: affine(0))
    yield Tensor(path + ".biases", "BF16", grouped, lambda: affine(1))


def prefix(form: Form, nested: bool) -> str:
    if not nested:
        return "model."
    return "language_model.model." if form == "mlx" else "model.language_model."


def checkpoint(
    d: Dims, form: Form, seed: int, tied: bool, nested: bool, extras: bool, a_log: str
) -> Iterator[Tensor]:
    """All tensors of a checkpoint, in the order in which they are placed."""

    def of(part: Part, path: str) -> Iterator[Tensor]:
        return tensors(part, path, f"{seed}/{part.name}", form, a_log)

    if extras and nested:
        tower = "vision_tower." if form == "mlx" else "model.visual."
        pixels = (64, 2, 16, 16, 3) if form == "mlx" else (64, 3, 2, 16, 16)
        for name, shape in (
            ("patch_embed.proj", pixels),
            ("blocks.0.norm1", (64,)),
            ("merger.linear_fc2", (d.hidden, 64)),
        ):
            yield from of(Part("vision." + name, shape, "vision"), tower + name)
    head = "language_model.lm_head" if form == "mlx" and nested else "lm_head"
    for part in architecture(d, form, tied):
        yield from of(part, head if part.name == "lm_head" else prefix(form, nested) + part.name)
    if extras and form == "published":
        for part in draft_head(d):
            yield from of(part, part.name)


# --- Safetensors --------------------------------------------------------------------------------


def header(shard: list[Tensor], form: Form, number: int) -> bytes:
    """The header of shard `number`, from 0, laid out as the form's usual writer does.

    The safetensors library pads its header so that data starts at a multiple of 8. MLX does not:
    data may start anywhere. Here the first shard starts at 7 mod 8, the next at 6, and so on.
    """
    entries: dict[str, Any] = {}
    at = 0
    for t in shard:
        span = [at, at + t.n_bytes]
        entries[t.name] = {"data_offsets": span, "dtype": t.dtype, "shape": list(t.shape)}
        at = span[1]
    if form == "published":
        entries = {"__metadata__": {"format": "pt"}, **entries}
        text = json.dumps(entries, separators=(",", ":"))
        return (text + " " * (-len(text) % 8)).encode()

    def mlx(fill: str) -> str:
        whole = {"__metadata__": {"format": "mlx", "shift": fill}, **entries}
        return json.dumps(whole, separators=(",", ":"), sort_keys=True)

    return mlx("." * ((7 - number - len(mlx(""))) % 8)).encode()


def write_shard(path: Path, shard: list[Tensor], form: Form, number: int) -> None:
    head = header(shard, form, number)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in shard:
            for chunk in tensor.data():
                file.write(chunk.data)


def write_tensors(folder: Path, every: list[Tensor], form: Form, limit: int) -> None:
    """Write `every` tensor, as one file, or as shards of at most `limit` bytes and an index."""
    shards: list[list[Tensor]] = [[]]
    for tensor in every:
        size = sum(t.n_bytes for t in shards[-1])
        if shards[-1] and size + tensor.n_bytes > limit:
            shards.append([])
        shards[-1].append(tensor)
    if form == "published":
        shards = [sorted(s, key=lambda t: (-BYTES[t.dtype], t.name)) for s in shards]
    placed = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        write_shard(folder / name, shard, form, number)
        placed.update({t.name: name for t in shard})
    if len(shards) > 1:
        total = sum(t.n_bytes for t in every)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        write_json(folder / "model.safetensors.index.json", index)


# --- Configuration ------------------------------------------------------------------------------


def text_config(d: Dims, tied: bool, text: Text = TEXT) -> dict[str, Any]:
    pairs = d.head_dim // 8  # a quarter of the head rotates, in pairs
    return {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": text.token_id("<|endoftext|>"),
        "dtype": "bfloat16",
        "eos_token_id": text.token_id("<|endoftext|>"),
        "full_attention_interval": d.interval,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "layer_types": [
            "full_attention" if d.is_attention(i) else "linear_attention" for i in range(d.layers)
        ],
        "linear_conv_kernel_dim": d.conv_kernel,
        "linear_key_head_dim": d.lin_k_dim,
        "linear_num_key_heads": d.lin_k_heads,
        "linear_num_value_heads": d.lin_v_heads,
        "linear_value_head_dim": d.lin_v_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": d.expert_width,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": d.q_heads,
        "num_experts": d.experts,
        "num_experts_per_tok": d.top_k,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": d.shared_width,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": d.vocab,
    }


def config(d: Dims, form: Form, tied: bool, nested: bool, text: Text = TEXT) -> dict[str, Any]:
    """config.json: the text configuration inside the multimodal one, or alone if not `nested`."""
    inner = text_config(d, tied, text)
    if nested:
        whole: dict[str, Any] = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": text.token_id("<|image_pad|>"),
            "model_type": "qwen3_5_moe",
            "text_config": inner,
            "tie_word_embeddings": tied,
            "video_token_id": text.token_id("<|video_pad|>"),
            "vision_config": {
                "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 64,
                "in_channels": 3, "intermediate_size": 128, "model_type": "qwen3_5_moe",
                "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": d.hidden,
                "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
            "vision_end_token_id": text.token_id("<|vision_end|>"),
            "vision_start_token_id": text.token_id("<|vision_start|>"),
        }  # fmt: skip
    else:
        whole = {"architectures": ["Qwen3_5MoeForCausalLM"], **inner}
    if form == "mlx":
        quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
        for part in architecture(d, form, tied):
            if part.bits != 4:
                path = prefix(form, nested) + part.name
                quantization[path] = {"group_size": GROUP, "bits": part.bits}
        whole["quantization"] = whole["quantization_config"] = quantization
    return whole


# --- Entry points -------------------------------------------------------------------------------


def write(
    folder: str | Path,
    preset: str | Dims,
    *,
    form: Form = "mlx",
    seed: int = 0,
    shard_bytes: int | None = None,
    tied: bool = False,
    nested: bool = True,
    extras: bool = True,
    dtype_a_log: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write a checkpoint and return its folder, which is made if absent.

    Args:
        preset: a name in `PRESETS`, or sizes of your own.
        shard_bytes: most tensor bytes in one file; one tensor may exceed it. Default: 4 GB.
        tied: leave the output head out; logits use the embedding.
        nested: wrap the text configuration in the multimodal one, and prefix names to match.
        extras: add tensors that a text engine skips (vision; in the published form, `mtp.*`).

    Raises:
        ValueError: unknown preset or form, or sizes that the mlx form cannot group.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise ValueError(f"preset: {preset!r}, expected one of {', '.join(PRESETS)}")
    if form not in get_args(Form):
        raise ValueError(f"form: {form!r}, expected mlx or published")
    d = PRESETS[preset] if isinstance(preset, str) else preset
    every = list(checkpoint(d, form, seed, tied, nested, extras, dtype_a_log))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(d, form, tied, nested))
    TEXT.write(folder)
    write_tensors(folder, every, form, shard_bytes or SHARD_BYTES)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--form", choices=get_args(Form), default="mlx")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    write(args.out, args.preset, form=args.form, seed=args.seed)
    n_bytes = sum(p.stat().st_size for p in args.out.glob("*.safetensors"))
    print(f"{args.out}: {n_bytes / 1e9:.3f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
