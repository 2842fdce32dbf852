"""What a model will take, told before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lily import _core
from lily.checkpoint import Checkpoint, open_checkpoint, resolve
from lily.html import table_html
from lily.loading import Kv, Precision, core_config, core_options, core_table

DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes.

    Attributes:
        weights: all weights, in the device's form.
        session: one session whatever its context: recurrent states, conv windows, logits.
        per_1000_tokens: KV cache of 1,000 tokens of context.
        scratch: temporaries of a prefill chunk and of a decode step.
        available: what the device may use.
        largest_context: tokens that fit beside weights, one session and scratch; 0 if not even
            those fit.
        native_context: tokens that the model was trained for.
        token_dispatches: kernel launches of a greedily decoded token.
        chunk_dispatches: kernel launches of a prompt's last chunk.
    """

    weights: int
    session: int
    per_1000_tokens: int
    scratch: int
    available: int
    largest_context: int
    native_context: int
    token_dispatches: int
    chunk_dispatches: int

    @property
    def default_context(self) -> int:
        """The context of sessions that ask for none."""
        return min(DEFAULT_CONTEXT, self.largest_context, self.native_context)

    def total(self, context: int) -> int:
        """Bytes with one session of `context` tokens."""
        return self.weights + self.session + self.scratch + context * self.per_1000_tokens // 1000

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("weights", amount(self.weights)),
            ("session", amount(self.session)),
            ("per 1,000 tokens", f"{self.per_1000_tokens / 1e6:.2f} MB"),
            ("scratch", amount(self.scratch)),
            ("available", amount(self.available)),
            (
                "largest context",
                f"{self.largest_context:,} tokens (trained for {self.native_context:,})",
            ),
            (
                "dispatches",
                f"{self.token_dispatches} a token, {self.chunk_dispatches} a prompt's last chunk",
            ),
        ]

    def __str__(self) -> str:
        return in_columns(self._rows())

    def __repr__(self) -> str:
        context = self.default_context
        return (
            f"MemoryPlan({amount(self.total(context))} with {context:,} tokens of context,"
            f" {amount(self.available)} available, at most {self.largest_context:,} tokens)"
        )

    def _repr_html_(self) -> str:
        context = self.default_context
        total = ("in all", f"{amount(self.total(context))} with {context:,} tokens of context")
        return table_html([total, *self._rows()])


def amount(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.2f} MB"


def in_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, a pair a line."""
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def plan(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    precision: Precision = "fast",
    kv: Kv | None = None,
    chunk: int | None = None,
    memory_limit: int | None = None,
    ablate: Sequence[str] = (),
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> MemoryPlan:
    """Say how much memory a checkpoint will take, without loading it.

    Args:
        source: a folder, or "org/name" on the Hugging Face hub.
        device: "auto", "cpu" or "metal".
        precision: "fast" or "float32".
        kv: element type of the KV cache, as in `Model.load`.
        chunk: tokens of a prefill pass; None takes the device's choice.
        memory_limit: bytes that may be used; None takes what the device offers.
        ablate: names of `techniques()`.
        revision: branch, tag or commit of a hub checkpoint.
        offline: open no connection.
        progress: called with ("download", bytes done, bytes in all).

    Raises:
        CheckpointError: the files are missing or wrong.
        DeviceError: no such device here.
        ValueError: an option is out of range.
    """
    folder, _ = resolve(source, revision, offline, progress)
    options = core_options(precision, kv=kv, chunk=chunk, memory_limit=memory_limit, ablate=ablate)
    return plan_checkpoint(open_checkpoint(folder), _core.Device(device, 1), options)


def plan_checkpoint(
    checkpoint: Checkpoint,
    device: _core.Device,
    options: _core.Options,
    n_tokens: int | None = None,
) -> MemoryPlan:
    """The same for a checkpoint that is open, of whose vocabulary `n_tokens` ids are real."""
    config = checkpoint.config
    core = core_config(config, n_tokens or config.vocab_size)
    need = _core.memory_need(device, core, core_table(checkpoint), options)
    return memory_plan(need, config.max_position_embeddings)


def memory_plan(need: Mapping[str, int], native_context: int) -> MemoryPlan:
    """From what the core says."""
    return MemoryPlan(
        weights=need["weight_bytes"],
        session=need["session_bytes"],
        per_1000_tokens=1000 * need["position_bytes"],
        scratch=need["scratch_bytes"],
        available=need["available_bytes"],
        largest_context=need["largest_context"],
        native_context=native_context,
        token_dispatches=need["token_dispatches"],
        chunk_dispatches=need["chunk_dispatches"],
    )
