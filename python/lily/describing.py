"""The commands `lily info` and `lily plan`: what a checkpoint is and takes, without loading it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from lily.terminal import Bar, printable


def show_plan(args: argparse.Namespace) -> None:
    from lily.memory import plan

    bar = Bar()
    try:
        memory = plan(
            args.model,
            device=args.device,
            precision=args.precision,
            kv=args.kv,
            memory_limit=args.memory_limit,
            ablate=args.ablate,
            revision=args.revision,
            offline=args.offline,
            progress=bar if bar.enabled else None,
        )
    finally:
        bar.clear()
    context = args.context or memory.default_context
    if args.json:
        totals = {
            "default_context": memory.default_context,
            "context": context,
            "total": memory.total(context),
        }
        print(json.dumps(asdict(memory) | totals, indent=2))
        return
    print(memory)
    if memory.total(context) > memory.available or not context:
        verdict = f"more than the {memory.available / 1e9:.2f} GB available"
    else:
        verdict = "fits"
    total = f"{memory.total(context) / 1e9:.2f} GB with {context:,} tokens"
    print(f"total               {total}: {verdict}")


def show_info(args: argparse.Namespace) -> None:
    from lily import _core
    from lily.checkpoint import open_checkpoint, resolve
    from lily.loading import core_options
    from lily.memory import plan_checkpoint
    from lily.sampling import Sampling

    bar = Bar()
    try:
        folder, revision = resolve(
            args.model, args.revision, args.offline, bar if bar.enabled else None
        )
    finally:
        bar.clear()
    checkpoint = open_checkpoint(folder)
    c = checkpoint.config
    sampling = Sampling.from_generation_config(checkpoint.generation_config)
    device = _core.Device(args.device, 0)
    options = core_options(args.precision, kv=args.kv, memory_limit=args.memory_limit)
    memory = plan_checkpoint(checkpoint, device, options)
    formats = Counter(
        "bf16" if f.bits == 16 else f"{f.bits}-bit, groups of {f.group_size}"
        for f in checkpoint.formats.values()
    )
    if args.json:
        print(
            json.dumps(
                {
                    "source": args.model,
                    "folder": str(folder),
                    "revision": revision,
                    "form": checkpoint.form,
                    "n_parameters": c.n_parameters,
                    "stored_bytes": checkpoint.weights_bytes,
                    "formats": dict(formats),
                    "config": asdict(c),
                    "sampling": asdict(sampling),
                    "stop_ids": checkpoint.stop_ids,
                    "tokenizer": checkpoint.tokenizer is not None,
                    "chat_template": checkpoint.chat_template is not None,
                    "device": device.description,
                    "precision": args.precision,
                    "memory": asdict(memory),
                },
                indent=2,
            )
        )
        return
    n_full = c.layer_types.count("full_attention")
    rows = [
        ("model", args.model + (f" @ {revision}" if revision else "")),
        ("folder", str(folder)),
        (
            "form",
            f"{checkpoint.form}, {c.n_parameters / 1e9:.3g} B parameters,"
            f" {checkpoint.weights_bytes / 1e9:.3g} GB stored",
        ),
        ("linear modules", "; ".join(f"{n} in {form}" for form, n in formats.most_common())),
        (
            "layers",
            f"{c.num_hidden_layers}: {c.num_hidden_layers - n_full} delta net, {n_full} attention",
        ),
        ("experts", f"{c.num_experts_per_tok} of {c.num_experts}, and a shared one"),
        ("vocabulary", f"{c.vocab_size:,}, ends at {', '.join(map(str, checkpoint.stop_ids))}"),
        ("tokenizer", "yes" if checkpoint.tokenizer else "none: no text, only token ids"),
        ("chat template", "yes" if checkpoint.chat_template else "none: no chat"),
        (
            "sampling",
            f"temperature {sampling.temperature}, top_k {sampling.top_k}, top_p {sampling.top_p}",
        ),
        ("device", f"{device.description}, {args.precision}"),
    ]
    for name, value in rows:
        print(f"{name:<20}{printable(value)}")
    print(memory)
