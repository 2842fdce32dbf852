"""What transformers makes of the demo checkpoint, unpacked, in float32.

    python tests/golden/generate_demo.py

Writes `demo.json` beside this file: greedy continuations, prose that the model wrote, and how
likely it finds that prose. README.md names the packages and versions it needs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

from golden.digests import file_digest  # noqa: E402
from golden.generate import write_unpacked  # noqa: E402

CHECKPOINT = HERE.parent.parent / "examples" / "demo_model" / "checkpoint"
PROMPTS = (
    "Once upon a time",
    "Dorothy looked up at the tall man and said",
    "<|im_start|>user\nWho was at the door?<|im_end|>\n<|im_start|>assistant\n<think>\n",
)
OPENINGS = ("It was late in the evening when", "The old house stood", "Alice looked at the Queen")
CONTINUED = 64
PROSE = 700


def continue_greedily(model: Any, ids: list[int], real: int) -> dict[str, Any]:
    """CONTINUED likeliest tokens, and by how much each leads the next likeliest one."""
    tokens, leads = [], []
    cache: Any = None
    piece = ids
    for _ in range(CONTINUED):
        out = model(torch.tensor([piece]), cache=cache, use_cache=True)
        cache = out.cache
        best = out.logits[0, -1, :real].topk(2)
        tokens.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
        piece = tokens[-1:]
    return {"prompt": ids, "tokens": tokens, "least_lead": round(min(leads), 6)}


def main() -> None:
    torch.manual_seed(3)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(CHECKPOINT / "tokenizer.json"))
    real = len(tokenizer)
    tags = sorted(tokenizer.added_tokens_decoder)
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        unpacked = write_unpacked(CHECKPOINT, Path(temporary) / "float32")
        model: Any = AutoModelForCausalLM.from_pretrained(
            unpacked, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        greedy = [continue_greedily(model, tokenizer.encode(p), real) for p in PROMPTS]
        prose = ""
        for opening in OPENINGS:
            ids = torch.tensor([tokenizer.encode(opening)])
            written = model.generate(
                ids, do_sample=True, temperature=0.8, top_k=40, top_p=0.95, max_new_tokens=PROSE,
                suppress_tokens=[*tags, *range(real, model.config.vocab_size)],
            )  # fmt: skip
            prose += tokenizer.decode(written[0].tolist()) + "\n"
        ids = tokenizer.encode(prose)
        nats = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids[:-1]])).logits[0].double(), torch.tensor(ids[1:])
        )
    whole = {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "sha256": file_digest(CHECKPOINT / "model.safetensors"),
        "greedy": greedy,
        "prose": prose,
        "prose_tokens": len(ids),
        "prose_nats_per_token": nats.item(),
    }
    (HERE / "demo.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print([g["least_lead"] for g in greedy], len(ids), nats.item())


if __name__ == "__main__":
    main()
