"""Opening a checkpoint: files, tokenizer and device become what a `Model` is made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lily import _core
from lily.checkpoint import open_checkpoint, resolve
from lily.errors import CheckpointError, ContextError
from lily.loading import Kv, Precision, check_kv, core_config, core_options, core_table
from lily.memory import plan_checkpoint
from lily.model_info import ModelInfo
from lily.sampling import Sampling
from lily.tokenizer import Tokenizer
from lily.weights_id import weights_id
from lily.whole_numbers import check_whole

MOST_REUSE_MEMORY = 2 << 30
"""Bytes that a model takes at most, unless told otherwise, to keep states of earlier prompts."""


class Opened(NamedTuple):
    """What a `Model` is made of."""

    engine: _core.Engine
    info: ModelInfo
    device: _core.Device
    tokenizer: Tokenizer | None
    reuse_memory: int


def open_model(
    source: str | os.PathLike[str],
    device: str,
    precision: Precision,
    kv: Kv | None,
    *,
    context: int | None,
    threads: int | None,
    chunk: int | None,
    memory_limit: int | None,
    reuse_memory: int | None,
    ablate: Sequence[str],
    revision: str | None,
    offline: bool,
    progress: Callable[[str, int, int], None] | None,
) -> Opened:
    """What `Model.load` does, and documents."""
    started = time.perf_counter()
    kv = check_kv(kv, precision)
    for name, value, low, high in (
        ("context", context, 1, 2**31 - 1),
        ("threads", threads, 1, 2**31 - 1),
        ("chunk", chunk, 1, 2**31 - 1),
        ("memory_limit", memory_limit, 1, None),
        ("reuse_memory", reuse_memory, 0, None),
    ):
        if value is not None:
            check_whole(name, value, low, high)
    options = core_options(
        precision,
        kv=kv,
        chunk=chunk,
        memory_limit=memory_limit,
        io_threads=max(2, min(4, os.cpu_count() or 2)),
        ablate=ablate,
    )
    folder, commit = resolve(source, revision, offline, progress)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    tokenizer = None
    if checkpoint.tokenizer is not None:
        tokenizer = Tokenizer(checkpoint.tokenizer, stop_ids=checkpoint.stop_ids)
        if tokenizer.n_tokens > config.vocab_size:
            raise CheckpointError(
                f"{checkpoint.tokenizer}: {tokenizer.n_tokens} tokens,"
                f" expected at most the model's vocab_size of {config.vocab_size}"
            )
    sampling = Sampling.from_generation_config(checkpoint.generation_config)

    n_tokens = tokenizer.n_tokens if tokenizer else config.vocab_size

    core_device = _core.Device(device, threads or 0)
    memory = plan_checkpoint(checkpoint, core_device, options, n_tokens)
    if context is not None and memory.largest_context and context > memory.largest_context:
        raise ContextError(
            f"context: {context} tokens, expected at most {memory.largest_context},"
            f" which is what fits in {memory.available / 1e9:.2f} GB beside the weights"
        )
    engine = _core.Engine.load(
        core_device,
        core_config(config, n_tokens),
        core_table(checkpoint),
        options,
        None if progress is None else lambda done, total: progress("load", done, total),
    )
    info = ModelInfo(
        source=os.fspath(source),
        folder=folder,
        revision=commit,
        form=checkpoint.form,
        n_parameters=config.n_parameters,
        config=config,
        device=core_device.description,
        precision=precision,
        kv=kv,
        context=context or memory.default_context,
        memory=memory,
        sampling=sampling,
        stop_ids=checkpoint.stop_ids,
        load_s=time.perf_counter() - started,
        ablated=tuple(ablate),
        weights_id=weights_id(checkpoint),
    )
    if reuse_memory is None:
        left = memory.available - memory.total(info.context)
        reuse_memory = min(max(left, 0) // 4, MOST_REUSE_MEMORY)
    return Opened(engine, info, core_device, tokenizer, reuse_memory)
