"""Train the demo model: transformers' qwen3_5_moe on a GPU, a few minutes.

    python examples/demo_model/train.py BOOKS.txt TEXT OUT

TEXT is the folder that prose.py wrote. OUT receives the model in its published form (bf16) and
`training.json`: arguments, versions, losses, routing. The last part of the training rounds the
weights as the 4-bit form will (straight-through gradients), so that little is lost by it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import fast_layers
import numpy as np
import prose
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

sys.path.append(str(Path(__file__).resolve().parent.parent))
import random_checkpoint
from text_files import Text, write_json

LENGTH = 1024  # tokens of a row
FULL_PRECISION = ("norm.weight", "A_log", "dt_bias")  # never rounded to bf16 while training


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("books", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--width", type=int, default=64, help="of one expert")
    parser.add_argument("--key-heads", type=int, default=2, help="of Gated DeltaNet")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bpe-dropout", type=float, default=0.0, help="of merges, until rounding")
    parser.add_argument("--chat", type=float, default=0.15, help="share of rows that are chats")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the routing loss")
    parser.add_argument("--rounding", type=float, default=0.3, help="share of steps, at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="steps between validations")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


# --- Data -----------------------------------------------------------------------------------------


class Rows:
    """Endless batches [rows, LENGTH + 1] of token ids, encoded anew for every pass."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, blocks: list[str]) -> None:
        self.args, self.tokenizer, self.blocks = args, tokenizer, blocks
        self.rng = random.Random(args.seed)
        self.pool = ThreadPoolExecutor(1)
        self.next = self.pool.submit(self.encode)
        self.ready: list[Tensor] = []

    def encode(self) -> list[Tensor]:
        """One pass over the text from a random start, and chats, as shuffled rows."""
        end: int = self.tokenizer.token_to_id("<|endoftext|>") or 0
        start = self.rng.randrange(len(self.blocks))
        blocks = self.blocks[start:] + self.blocks[:start]
        ids = [i for e in self.tokenizer.encode_batch(blocks) for i in e.ids]
        ids = ids[self.rng.randrange(LENGTH) :]
        n_chats = int(len(ids) / 200 * self.args.chat / (1 - self.args.chat))
        chats = list(islice(prose.conversations(self.blocks, self.rng), n_chats))
        for encoding in self.tokenizer.encode_batch(chats):
            ids += [*encoding.ids, end]
        n = len(ids) // (LENGTH + 1)
        rows = torch.tensor(ids[: n * (LENGTH + 1)]).view(n, LENGTH + 1)
        order = list(range(n))
        self.rng.shuffle(order)
        return list(rows[order].split(self.args.rows))[:-1]

    def batch(self) -> Tensor:
        if not self.ready:
            self.ready = self.next.result()
            self.next = self.pool.submit(self.encode)
        return self.ready.pop()


# --- Model ----------------------------------------------------------------------------------------


def dims(args: argparse.Namespace) -> random_checkpoint.Dims:
    return random_checkpoint.Dims(
        hidden=512, layers=8, vocab=prose.VOCABULARY, q_heads=8, kv_heads=1, head_dim=256,
        lin_k_heads=args.key_heads, lin_v_heads=2 * args.key_heads, lin_k_dim=128, lin_v_dim=128,
        experts=args.experts, top_k=4, expert_width=args.width, shared_width=args.width,
    )  # fmt: skip


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    vocabulary = json.loads((args.text / "tokenizer.json").read_text("utf-8"))["model"]
    text = Text(list(vocabulary["vocab"]), vocabulary["merges"])
    whole = random_checkpoint.config(dims(args), "published", tied=True, nested=True, text=text)
    for name in [n for n in whole if n.startswith(("vision", "image", "video"))]:
        del whole[name]
    whole["text_config"] |= {"max_position_embeddings": 4096, "mtp_num_hidden_layers": 0}
    return whole


def add_dropout(model: nn.Module, p: float) -> None:
    """Drop what the embedding, each mixer and each feed-forward add to the residual."""
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "out_proj", "mlp")):
            module.register_forward_hook(lambda m, _, out: F.dropout(out, p, m.training))


class Routing:
    """The router's logits of the last forward pass, and what they say."""

    def __init__(self, model: Qwen3_5MoeForCausalLM) -> None:
        self.logits: list[Tensor] = []
        self.top_k = model.config.num_experts_per_tok
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, out: self.logits.append(out[0]))

    def shares(self) -> tuple[Tensor, Tensor]:
        """[layers, experts]: fraction of choices, and mean probability, of each expert."""
        p = torch.stack(self.logits).float().softmax(-1)
        chosen = torch.zeros_like(p).scatter_(-1, p.topk(self.top_k, -1).indices, 1.0 / self.top_k)
        return chosen.mean(1), p.mean(1)

    def loss(self) -> Tensor:
        """Per layer, 1 when the choices are even (Switch Transformer, eq. 4)."""
        chosen, p = self.shares()
        return p.shape[-1] * (chosen * p).sum(-1).mean()


# --- Rounding to 4 bits ---------------------------------------------------------------------------


def bits(name: str, w: Tensor) -> int:
    """Bits of a parameter in the 4-bit form; 16 for what stays."""
    if w.ndim < 2 or "conv1d" in name:
        return 16
    return 8 if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) else 4


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def rounded(w: Tensor, n: int) -> Tensor:
    """What an affine form with codes 0..n in groups of 64 makes of w: the extreme is exact."""
    groups = w.to(torch.bfloat16).float().unflatten(-1, (-1, 64))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / n).clamp_min(1e-7)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, 0.0)
    codes = torch.round((groups - bias) / scale).clamp(0, n)
    near = codes * scale.to(torch.bfloat16).float() + bias.to(torch.bfloat16).float()
    return near.flatten(-2)


def working_weights(master: dict[str, Tensor], rounding: bool) -> dict[str, Tensor]:
    """The weights of one forward pass; gradients pass straight to the master weights."""
    out = {}
    for name, w in master.items():
        if rounding and bits(name, w) < 16:
            w = w + (rounded(w.detach(), 2 ** bits(name, w) - 1) - w.detach())
        out[name] = w if name.endswith(FULL_PRECISION) else w.to(torch.bfloat16)
    return out


# --- Training -------------------------------------------------------------------------------------


@torch.no_grad()
def validate(
    model: nn.Module, weights: dict[str, Tensor], rows: Tensor, routing: Routing
) -> tuple[float, Tensor]:
    """Mean loss in nats per token, and each expert's share of choices [layers, experts]."""
    model.eval()
    losses, shares = [], []
    for batch in rows.split(16):
        routing.logits.clear()
        logits = functional_call(model, weights, kwargs={"input_ids": batch[:, :-1]}).logits
        losses += F.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
        ).split(10_000)
        shares.append(routing.shares()[0])
    routing.logits.clear()
    model.train()
    return torch.cat(losses).mean().item(), torch.stack(shares).mean(0)


def entropy(shares: Tensor) -> list[float]:
    """Per layer, of the experts' shares of choices: 1 is even."""
    h = -(shares * shares.clamp_min(1e-12).log()).sum(-1) / math.log(shares.shape[-1])
    return [round(x, 4) for x in h.tolist()]


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    if args.device == "cuda":
        fast_layers.install()
    tokenizer = Tokenizer.from_file(str(args.text / "tokenizer.json"))
    whole = configuration(args)
    blocks, held = prose.split(prose.read(args.books))
    held_ids = [i for e in tokenizer.encode_batch(held) for i in e.ids]
    n_held = len(held_ids) // (LENGTH + 1)
    held_rows = torch.tensor(held_ids[: n_held * (LENGTH + 1)]).view(n_held, -1).to(args.device)

    config = Qwen3_5MoeTextConfig(**whole["text_config"])
    model = Qwen3_5MoeForCausalLM(config).to(args.device).train()
    model.config.use_cache = False
    add_dropout(model, args.dropout)
    routing = Routing(model)
    master = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    n_parameters = sum(p.numel() for p in master.values())
    decays = [p for name, p in master.items() if bits(name, p) < 16]
    plain = [p for name, p in master.items() if bits(name, p) == 16]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": args.weight_decay}, {"params": plain}],
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=args.device == "cuda",
    )

    tokenizer.model.dropout = args.bpe_dropout or None
    data = Rows(args, tokenizer, blocks)
    curve: list[dict[str, Any]] = []
    best: dict[str, Any] = {"loss": math.inf}
    started = time.perf_counter()
    since, at = started, 0
    for step in range(1, args.steps + 1):
        rounding = step > args.steps * (1 - args.rounding)
        if rounding and tokenizer.model.dropout:
            tokenizer.model.dropout = None
        done = step / args.steps
        rate = min(1.0, step / 100, (1 - done) / 0.6)  # warm up, hold, then down in a line
        for group in optimizer.param_groups:
            group["lr"] = args.lr * max(rate, 0.01)
        batch = data.batch().to(args.device)
        weights = working_weights(master, rounding)
        routing.logits.clear()
        logits = functional_call(model, weights, kwargs={"input_ids": batch[:, :-1]}).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        (loss + args.balance * routing.loss()).backward()
        nn.utils.clip_grad_norm_(master.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.every and step != args.steps:
            continue
        train_loss = loss.item()
        step_ms = 1000 * (time.perf_counter() - since) / (step - at)
        with torch.no_grad():
            weights = working_weights(master, rounding)
        held_loss, shares = validate(model, weights, held_rows, routing)
        curve.append(
            {"step": step, "train": train_loss, "validation": held_loss, "rounding": rounding}
        )
        # Only weights trained under rounding are candidates, unless there is no such part.
        if held_loss < best["loss"] and (rounding or not args.rounding):
            best = {"loss": held_loss, "step": step, "shares": shares}
            best["weights"] = {n: p.detach().clone() for n, p in master.items()}
        print(
            f"step {step}  train {train_loss:.4f}  validation {held_loss:.4f}"
            f"{' rounded' if rounding else ''}  {step_ms:.0f} ms/step"
            f"  least used {shares.min() * shares.shape[-1]:.2f}",
            flush=True,
        )
        if rounding and step - best["step"] > 6 * args.every:
            break  # it only gets worse: early stopping
        since, at = time.perf_counter(), step

    # What is published is bf16: measure exactly that, and what 4 bits make of it.
    published = {n: p.to(torch.bfloat16) for n, p in best["weights"].items()}
    as_floats = {n: p.float() for n, p in published.items()}
    final = {}
    for form in ("bf16", "4-bit"):
        with torch.no_grad():
            weights = working_weights(as_floats, form == "4-bit")
        final[form] = validate(model, weights, held_rows, routing)[0]
    peak = max((c for c in curve if not c["rounding"]), key=lambda c: -c["validation"], default={})
    report = {
        "arguments": {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()},
        "parameters": n_parameters,
        "training_tokens_per_step": args.rows * LENGTH,
        "validation_tokens": n_held * LENGTH,
        "best_step": best["step"],
        "validation_loss": final,
        "validation_loss_before_rounding": peak.get("validation"),
        "routing_entropy": entropy(best["shares"]),
        "least_used_expert": [round(x, 4) for x in (best["shares"].min(-1).values).tolist()],
        "most_used_expert": [round(x, 4) for x in (best["shares"].max(-1).values).tolist()],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "none",
        },
        "seconds": round(time.perf_counter() - started, 1),
        "curve": curve,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "training.json", report)
    write_json(args.out / "config.json", whole)
    for path in args.text.iterdir():
        shutil.copy(path, args.out / path.name)
    write_shards(published, args.out)
    print(json.dumps({n: v for n, v in report.items() if n != "curve"}, indent=1))


def write_shards(weights: dict[str, Tensor], folder: Path, limit: int = 16_500_000) -> None:
    """Save under the published names, in files of at most `limit` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, w in weights.items():
        w = w.cpu().contiguous()
        if sum(t.nbytes for t in shards[-1].values()) + w.nbytes > limit:
            shards.append({})
        shards[-1]["model.language_model." + name.removeprefix("model.")] = w
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)


if __name__ == "__main__":
    main()
