# SPDX-License-Identifier: Apache-2.0
"""The peer: llama.cpp on a random checkpoint with real layer shapes.

Needs ``gguf`` and ``llama-cpp-python`` (built for this machine: ``CMAKE_ARGS=-DGGML_NATIVE=ON``).

    python peer_llama_cpp.py write-gguf mid-q4km.gguf
    python peer_llama_cpp.py run mid-q4km.gguf --prompt 512 --decode 128 --rounds 5 --threads 2

``run`` prints one JSON line a round on stdout; everything else goes to stderr. To alternate rounds
with another engine in one sitting, start it with ``--step``: the model is loaded once, and each
round waits for a line on stdin.

The weights are random, so the text is noise; sizes, formats and memory traffic are the model's.
Tokens are drawn from a fixed seed instead of being sampled, which keeps the routed experts
changing from token to token as they do in real text.

Two things to know on a machine with AMX. llama.cpp by default copies dense weights into an AMX
layout and experts into an interleaved one, which is not always the faster choice: measure with and
without ``--no-repack`` and quote the better. And some compilers (gcc 12.2) drop most of the
tile configuration, so that their build dies of an illegal instruction without ``--no-repack``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[np.random.Generator], NDArray[np.float32]]

SHORT_PROMPT = 16  # tokens before the decode measurement, not timed
UBATCH = 512  # llama.cpp's default prompt chunk


@dataclass(frozen=True)
class Shape:
    """Dimensions of a checkpoint; the defaults are the ``mid`` preset, about 2 B parameters."""

    hidden: int = 2048
    layers: int = 8
    full_attention_interval: int = 4
    vocab: int = 49664
    q_heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    rope_theta: float = 1e7
    rms_eps: float = 1e-6
    k_heads: int = 16
    v_heads: int = 32
    linear_dim: int = 128
    conv: int = 4
    experts: int = 64
    experts_used: int = 8
    expert_width: int = 512
    shared_width: int = 512
    context: int = 262144

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


@dataclass(frozen=True)
class Tensor:
    """One GGUF tensor: shape in row-major order, and how to draw its values."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.float16 | np.float32]
    draw: Draw


def matrix(name: str, *shape: int, std: float | None = None, f32: bool = False) -> Tensor:
    """A weight ``[..., out, in]`` with standard deviation 1/sqrt(in), so that values keep size."""
    scale = np.float32(shape[-1] ** -0.5 if std is None else std)

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= scale
        return values

    return Tensor(name, shape, np.float32 if f32 else np.float16, draw)


def norm(name: str, size: int) -> Tensor:
    """A norm weight around 1: GGUF stores 1 + w where the published file stores w."""

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    return Tensor(name, (size,), np.float32, draw)


def decay(name: str, heads: int) -> Tensor:
    """-exp(A_log), which GGUF stores in place of A_log."""

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        return (-rng.uniform(1, 16, heads)).astype(np.float32)

    return Tensor(name, (heads,), np.float32, draw)


def time_step(name: str, heads: int) -> Tensor:
    """dt_bias with softplus(dt_bias) log-uniform in 0.001..0.1, the usual initialisation."""

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads)))).astype(
            np.float32
        )

    return Tensor(name, (heads,), np.float32, draw)


def attention_tensors(s: Shape, block: str) -> Iterator[Tensor]:
    yield matrix(f"{block}.attn_q.weight", 2 * s.q_heads * s.head_dim, s.hidden)  # query and gate
    yield matrix(f"{block}.attn_k.weight", s.kv_heads * s.head_dim, s.hidden)
    yield matrix(f"{block}.attn_v.weight", s.kv_heads * s.head_dim, s.hidden)
    yield matrix(f"{block}.attn_output.weight", s.hidden, s.q_heads * s.head_dim)
    yield norm(f"{block}.attn_q_norm.weight", s.head_dim)
    yield norm(f"{block}.attn_k_norm.weight", s.head_dim)


def delta_net_tensors(s: Shape, block: str) -> Iterator[Tensor]:
    """GGUF tiles the value heads (0, 2, ..., 1, 3, ...); random weights need no reordering."""
    value = s.v_heads * s.linear_dim
    channels = 2 * s.k_heads * s.linear_dim + value
    yield matrix(f"{block}.attn_qkv.weight", channels, s.hidden)
    yield matrix(f"{block}.attn_gate.weight", value, s.hidden)
    yield matrix(f"{block}.ssm_conv1d.weight", channels, s.conv, f32=True)
    yield time_step(f"{block}.ssm_dt.bias", s.v_heads)
    yield decay(f"{block}.ssm_a", s.v_heads)
    yield matrix(f"{block}.ssm_alpha.weight", s.v_heads, s.hidden)
    yield matrix(f"{block}.ssm_beta.weight", s.v_heads, s.hidden)
    yield norm(f"{block}.ssm_norm.weight", s.linear_dim)
    yield matrix(f"{block}.ssm_out.weight", s.hidden, value)


def moe_tensors(s: Shape, block: str) -> Iterator[Tensor]:
    yield matrix(f"{block}.ffn_gate_inp.weight", s.experts, s.hidden, f32=True)
    yield matrix(f"{block}.ffn_gate_exps.weight", s.experts, s.expert_width, s.hidden)
    yield matrix(f"{block}.ffn_up_exps.weight", s.experts, s.expert_width, s.hidden)
    yield matrix(f"{block}.ffn_down_exps.weight", s.experts, s.hidden, s.expert_width)
    yield matrix(f"{block}.ffn_gate_inp_shexp.weight", s.hidden, f32=True)
    yield matrix(f"{block}.ffn_gate_shexp.weight", s.shared_width, s.hidden)
    yield matrix(f"{block}.ffn_up_shexp.weight", s.shared_width, s.hidden)
    yield matrix(f"{block}.ffn_down_shexp.weight", s.hidden, s.shared_width)


def checkpoint_tensors(s: Shape) -> Iterator[Tensor]:
    """Every tensor llama.cpp's ``qwen35moe`` loader asks for, in file order."""
    yield matrix("token_embd.weight", s.vocab, s.hidden, std=1.0)
    yield norm("output_norm.weight", s.hidden)
    yield matrix("output.weight", s.vocab, s.hidden)
    for layer in range(s.layers):
        block = f"blk.{layer}"
        yield norm(f"{block}.attn_norm.weight", s.hidden)
        mixer = attention_tensors if s.is_full_attention(layer) else delta_net_tensors
        yield from mixer(s, block)
        yield norm(f"{block}.post_attention_norm.weight", s.hidden)
        yield from moe_tensors(s, block)


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str], int]:
    """Tokens and merges of a byte-level BPE: 256 bytes, byte pairs, one end token (its id last)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    pairs = [(a, b) for a in letters for b in letters][: size - 257]
    tokens = [*letters, *(a + b for a, b in pairs), "<|endoftext|>"]
    if len(tokens) != size:
        raise ValueError(f"vocabulary of {size} is outside 257..65793")
    return tokens, [f"{a} {b}" for a, b in pairs], size - 1


def write_metadata(gguf: Any, writer: Any, s: Shape) -> None:
    writer.add_name("random qwen3_5_moe")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_full_attention_interval(s.full_attention_interval)
    writer.add_head_count(s.q_heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.rms_eps)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_rope_dimension_count(s.rotary)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(s.conv)
    writer.add_ssm_state_size(s.linear_dim)
    writer.add_ssm_group_count(s.k_heads)
    writer.add_ssm_time_step_rank(s.v_heads)
    writer.add_ssm_inner_size(s.v_heads * s.linear_dim)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.experts_used)
    writer.add_expert_feed_forward_length(s.expert_width)
    writer.add_expert_shared_feed_forward_length(s.shared_width)

    tokens, merges, end = byte_level_vocabulary(s.vocab)
    kinds = [int(gguf.TokenType.NORMAL)] * s.vocab
    kinds[end] = int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_add_bos_token(False)


def write_f16(path: Path, s: Shape, seed: int) -> None:
    """Write the random checkpoint, one tensor in memory at a time."""
    gguf: Any = import_module("gguf")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35MOE])
    write_metadata(gguf, writer, s)
    tensors = list(checkpoint_tensors(s))
    for t in tensors:
        dtype: np.dtype[Any] = np.dtype(t.dtype)
        writer.add_tensor_info(t.name, t.shape, dtype, math.prod(t.shape) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for t in tensors:
        writer.write_tensor_data(t.draw(rng).astype(t.dtype, copy=False))
    writer.close()

    parameters = sum(math.prod(t.shape) for t in tensors)
    print(f"{path}: {len(tensors)} tensors, {parameters / 1e9:.3f} B parameters", file=sys.stderr)


class LlamaCpp:
    """llama.cpp through its C interface: no sampler, no Python work inside a timed pass."""

    def __init__(self, verbose: bool) -> None:
        self.c: Any = import_module("llama_cpp")

        def log(level: int, text: bytes, _user: object) -> None:
            # GGML_LOG_LEVEL_WARN is 3, ERROR 4, CONT (the rest of a line) 5.
            if verbose or level in (3, 4):
                sys.stderr.write(text.decode("utf-8", "replace"))

        self._log = self.c.llama_log_callback(log)  # llama.cpp keeps the pointer
        self.c.llama_log_set(self._log, ctypes.c_void_p(0))
        self.c.llama_backend_init()

    def system_info(self) -> str:
        return str(self.c.llama_print_system_info().decode())

    def quantize(self, source: Path, target: Path, threads: int) -> None:
        params = self.c.llama_model_quantize_default_params()
        params.nthread = threads
        params.ftype = self.c.LLAMA_FTYPE_MOSTLY_Q4_K_M
        status = self.c.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        if status != 0:
            raise RuntimeError(f"llama_model_quantize failed on {source}: {status}")

    def load(self, path: Path, *, context: int, threads: int, repack: bool) -> None:
        model_params = self.c.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = self.c.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = self.c.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = context
        params.n_ubatch = UBATCH
        params.n_threads = threads
        params.n_threads_batch = threads
        self.context = self.c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context} tokens")
        self.memory = self.c.llama_get_memory(self.context)
        self.vocab: int = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))

    def reset(self) -> None:
        self.c.llama_memory_clear(self.memory, True)

    def tokens(self, values: NDArray[np.int32]) -> Any:
        return (self.c.llama_token * len(values))(*values.tolist())

    def forward(self, tokens: Any) -> None:
        """Append the tokens and wait for the logits of the last one."""
        status = self.c.llama_decode(self.context, self.c.llama_batch_get_one(tokens, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode failed: {status}")
        self.c.llama_synchronize(self.context)

    def logits(self) -> NDArray[np.float32]:
        pointer = self.c.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab,)).copy()

    def close(self) -> None:
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


def measure(engine: LlamaCpp, rng: np.random.Generator, prompt: int, decode: int) -> list[float]:
    """Seconds for a prompt from an empty context, then for single tokens after a short prompt."""
    text = engine.tokens(rng.integers(engine.vocab, size=prompt, dtype=np.int32))
    engine.reset()
    start = time.perf_counter()
    engine.forward(text)
    prefill = time.perf_counter() - start
    if not np.isfinite(engine.logits()).all():
        raise RuntimeError("logits are not finite")

    short = engine.tokens(rng.integers(engine.vocab, size=SHORT_PROMPT, dtype=np.int32))
    steps = [
        engine.tokens(rng.integers(engine.vocab, size=1, dtype=np.int32)) for _ in range(decode)
    ]
    engine.reset()
    engine.forward(short)
    start = time.perf_counter()
    for token in steps:
        engine.forward(token)
    return [prefill, time.perf_counter() - start]


def write_gguf(args: argparse.Namespace) -> None:
    half = args.out.with_suffix(".f16.gguf")
    write_f16(half, Shape(), args.seed)
    LlamaCpp(args.verbose).quantize(half, args.out, args.threads)
    if not args.keep_f16:
        half.unlink()
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.0f} MB", file=sys.stderr)


def run(args: argparse.Namespace) -> None:
    engine = LlamaCpp(args.verbose)
    context = -(-max(args.prompt, SHORT_PROMPT + args.decode) // 256) * 256
    engine.load(args.gguf, context=context, threads=args.threads, repack=not args.no_repack)
    print(engine.system_info(), file=sys.stderr)
    measure(engine, np.random.default_rng(args.seed), args.prompt, min(args.decode, 8))  # warm-up
    for number in range(args.rounds):
        if args.step and not sys.stdin.readline():
            break
        rng = np.random.default_rng(args.seed + 1 + number)
        prefill, decode = measure(engine, rng, args.prompt, args.decode)
        line = {
            "engine": "llama.cpp",
            "prefill_tok_s": round(args.prompt / prefill, 2),
            "decode_tok_s": round(args.decode / decode, 3),
        }
        print(json.dumps(line), flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure llama.cpp on a random checkpoint.")
    commands = parser.add_subparsers(required=True)

    write = commands.add_parser("write-gguf", help="write a random checkpoint, quantised to Q4_K_M")
    write.add_argument("out", type=Path)
    write.add_argument("--keep-f16", action="store_true", help="keep OUT's .f16.gguf beside it")
    write.set_defaults(action=write_gguf)

    rounds = commands.add_parser("run", help="print one JSON line a round")
    rounds.add_argument("gguf", type=Path)
    rounds.add_argument("--prompt", type=int, default=512, help="tokens in the timed prompt")
    rounds.add_argument("--decode", type=int, default=128, help="tokens decoded one by one")
    rounds.add_argument("--rounds", type=int, default=5)
    rounds.add_argument("--step", action="store_true", help="wait for a stdin line each round")
    rounds.add_argument("--no-repack", action="store_true", help="leave weights as stored (mmap)")
    rounds.set_defaults(action=run)

    for command in (write, rounds):
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--verbose", action="store_true", help="llama.cpp's log on stderr")
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
