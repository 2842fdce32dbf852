"""Run the public implementations on random checkpoints and keep what they compute.

    python tests/golden/generate.py [--work FOLDER]

Writes one `PRESET-FORM.safetensors` per case beside this file, and prints how far the
implementations and the NumPy reference are from each other. README.md names the versions that
it needs and the arrays that it writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

import random_checkpoint  # noqa: E402
from random_checkpoint import Form  # noqa: E402
from reference.model import ReferenceModel  # noqa: E402
from reference.weights import load_dequantised, read_config  # noqa: E402

Arrays = dict[str, NDArray[Any]]

SEED = 0
PROMPT, DECODE = 80, 8
FORMS: tuple[Form, ...] = ("mlx", "published")
CASES = [(preset, form) for preset in ("tiny", "heads") for form in FORMS]
PACKAGES = ("mlx", "mlx-lm", "torch", "transformers", "numpy", "safetensors")

# Positions whose logits are kept: all, or the start, both sides of 16, 32 and 64, and the end.
POSITIONS = {
    "tiny": list(range(PROMPT + DECODE)),
    "heads": [0, 1, 2, 3, 4, 15, 16, 31, 32, 47, 62, 63, 64, 65, 78, *range(79, PROMPT + DECODE)],
}
# Value heads whose recurrent state is kept.
HEADS = {"tiny": [0, 1, 2, 3], "heads": [0, 7]}


def pieces(tokens: list[int]) -> list[list[int]]:
    """The prompt in one call, then one token at a time."""
    return [tokens[:PROMPT], *[[t] for t in tokens[PROMPT:]]]


def run_mlx(folder: Path, tokens: list[int], layer: int) -> Arrays:
    """mlx-lm on the packed checkpoint: float32 scales, biases, norms and activations."""
    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.load(str(folder))[:2]
    model.set_dtype(mx.float32)
    cache = model.make_cache()
    logits = [np.array(model(mx.array([piece]), cache=cache)[0]) for piece in pieces(tokens)]
    conv, state = (np.array(x[0]) for x in (cache[layer][0], cache[layer][1]))
    return {"logits": np.concatenate(logits), "conv": conv, "state": state}


def run_transformers(folder: Path, tokens: list[int], layer: int, taps: int) -> Arrays:
    """transformers in float32, with its own eager attention and delta rule."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    cache: Any = None
    logits, router = [], []
    with torch.inference_mode():
        for piece in pieces(tokens):
            out = model(
                torch.tensor([piece]), cache=cache, use_cache=True, output_router_logits=True
            )
            cache = out.cache
            logits.append(out.logits[0])
            router.append(torch.stack([r.reshape(len(piece), -1) for r in out.router_logits]))
    top = model.config.get_text_config().num_experts_per_tok
    probs = torch.cat(router, dim=1).softmax(-1).sort(-1, descending=True).values
    conv = cache.get_conv_state(layer)[0, :, 1 - taps :]
    return {
        "logits": torch.cat(logits).numpy(),
        "conv": conv.T.numpy(),
        "state": cache.get_recurrent_state(layer)[0].transpose(1, 2).numpy(),
        "router_margin": (probs[..., top - 1] - probs[..., top]).numpy(),
    }


def write_unpacked(source: Path, folder: Path) -> Path:
    """The float32 weights that an MLX checkpoint stands for, in the published layout."""
    folder.mkdir()
    w = load_dequantised(source)
    out: Arrays = {}
    for name, value in w.items():
        path = "lm_head" if name == "lm_head" else "model.language_model." + name
        last = name.rpartition(".")[2]
        if last in ("A_log", "dt_bias"):
            out[path] = value
        elif last == "conv1d":
            out[path + ".weight"] = value[:, None, :]
        elif last.endswith("norm") and "linear_attn" not in name:
            out[path + ".weight"] = value - np.float32(1)
        elif "switch_mlp" not in name:
            out[path + ".weight"] = value
        elif last == "gate_proj":
            up = w[name.replace("gate_proj", "up_proj")]
            experts = path.replace("switch_mlp.gate_proj", "experts.gate_up_proj")
            out[experts] = np.concatenate([value, up], axis=1)
        elif last == "down_proj":
            out[path.replace("switch_mlp", "experts")] = value
    out = {name: np.ascontiguousarray(value) for name, value in out.items()}
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    config = read_config(source)
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def worst(x: NDArray[Any], want: NDArray[Any]) -> float:
    """Relative RMS error of the worst position."""
    x, want = x.astype(np.float64), want.astype(np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2, -1) / np.mean(want**2, -1)).max())


def run_case(preset: str, form: Form, work: Path) -> tuple[Arrays, Mapping[str, Any]]:
    folder = random_checkpoint.write(work / f"{preset}-{form}", preset, form=form, seed=SEED)
    d = random_checkpoint.PRESETS[preset]
    draws = np.random.PCG64(SEED).random_raw(PROMPT + DECODE)
    tokens = [int(x) % d.vocab for x in draws]
    layer = d.layers - 2  # the last delta net

    found: dict[str, Arrays] = {}
    readable = folder
    if form == "mlx":
        found["mlx_lm"] = run_mlx(folder, tokens, layer)
        readable = write_unpacked(folder, work / f"{preset}-unpacked")
    found["transformers"] = run_transformers(readable, tokens, layer, d.conv_kernel)
    for kind in (np.float32, np.float64):
        model = ReferenceModel(folder, kind)
        logits = np.array([model.step(t) for t in tokens])
        found[np.dtype(kind).name] = {
            "logits": logits, "conv": model.windows[layer], "state": model.states[layer]
        }  # fmt: skip

    names = list(found)
    margin = found["transformers"]["router_margin"]
    print(f"{preset} {form}: smallest router margin {margin.min():.1e}; worst relative RMS")
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            errors = [
                f"{key} {worst(found[a][key].reshape(n, -1), found[b][key].reshape(n, -1)):.1e}"
                for key, n in (("logits", len(tokens)), ("state", 1), ("conv", 1))
            ]
            print(f"  {a} to {b}: {', '.join(errors)}")

    source = found[names[0]]
    arrays: Arrays = {
        "tokens": np.array(tokens, np.int32),
        "positions": np.array(POSITIONS[preset], np.int32),
        "router_margin": margin,
        "conv": source["conv"],
        "state_heads": np.array(HEADS[preset], np.int32),
        "state": source["state"][HEADS[preset]],
    }
    for name in names:
        if not name.startswith("float"):
            arrays[name + ".logits"] = found[name]["logits"][POSITIONS[preset]]
    case = {
        "preset": preset, "form": form, "seed": SEED, "prompt": PROMPT, "layer": layer,
        "state_from": names[0], "versions": {name: version(name) for name in PACKAGES},
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }  # fmt: skip
    return {k: np.ascontiguousarray(v) for k, v in arrays.items()}, case


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, help="where checkpoints go (default: a new folder)")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="golden-"))
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for preset, form in CASES:
        arrays, case = run_case(preset, form, work)
        # One metadata key: the library writes several in no fixed order.
        save_file(arrays, HERE / f"{preset}-{form}.safetensors", {"case": json.dumps(case)})


if __name__ == "__main__":
    main()
