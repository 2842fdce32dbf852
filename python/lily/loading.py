"""From a checkpoint as Python read it to what the C++ core takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lily import _core
from lily.checkpoint import Checkpoint
from lily.config import Config

Precision = Literal["fast", "float32"]
Kv = Literal["bf16", "float32", "int8"]

_PLAIN = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rotary_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)


def techniques() -> dict[str, str]:
    """What plans do to be fast, each of which can be left out to measure its worth.

    Returns:
        Name -> what a plan does without it.
    """
    return dict(_core.techniques())


def core_options(
    precision: Precision,
    *,
    kv: Kv | None = None,
    chunk: int | None = None,
    memory_limit: int | None = None,
    io_threads: int = 1,
    ablate: Sequence[str] = (),
) -> _core.Options:
    """How the core runs a model; None takes the device's choice.

    Raises:
        ValueError: a name in `ablate` is unknown, or see `check_kv`.
    """
    return _core.Options(
        precision,
        chunk=chunk or 0,
        memory_bytes=memory_limit or 0,
        io_threads=io_threads,
        ablate=list(ablate),
        kv_int8=check_kv(kv, precision) == "int8",
    )


def core_config(config: Config, n_tokens: int) -> _core.Config:
    """The core's view of a configuration; `n_tokens` ids are real, the rest padding."""
    out = _core.Config()
    for name in _PLAIN:
        setattr(out, name, getattr(config, name))
    out.full_attention = [kind == "full_attention" for kind in config.layer_types]
    out.n_tokens = n_tokens
    return out


def core_table(checkpoint: Checkpoint) -> _core.TensorTable:
    """Where the tensors are; the core checks all of it again before it reads."""
    table = _core.TensorTable()
    table.files = [str(path) for path in checkpoint.files]
    table.published = checkpoint.form == "published"
    for name, entry in checkpoint.tensors.items():
        table.add_tensor(
            name, entry.file, entry.offset, entry.nbytes, entry.dtype, list(entry.shape)
        )
    for module, form in checkpoint.formats.items():
        if form.bits != 16:
            table.add_format(module, form.bits, form.group_size)
    return table


def check_kv(kv: Kv | None, precision: Precision) -> Kv:
    """The cache's element type: int8, or that of the precision's activations.

    Raises:
        ValueError: `kv` or `precision` is unknown, or they do not go together.
    """
    if precision not in ("fast", "float32"):
        raise ValueError(f'precision: {precision!r}, expected "fast" or "float32"')
    own: Kv = "bf16" if precision == "fast" else "float32"
    if kv not in (None, own, "int8"):
        raise ValueError(f'kv: {kv!r}, expected "{own}" or "int8" with precision "{precision}"')
    return kv or own
