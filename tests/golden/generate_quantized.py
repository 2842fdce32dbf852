"""Convert random checkpoints with mlx-lm and keep digests of what it writes.

    python tests/golden/generate_quantized.py

Writes `quantized.json` beside this file; README.md names the packages and versions it needs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

import random_checkpoint  # noqa: E402
from golden.digests import digests, file_digest  # noqa: E402

# Options of random_checkpoint.write, and the most bytes of a file of the result.
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "tiny": ({"preset": "tiny"}, None),
    "heads": ({"preset": "heads"}, None),
    "tied": ({"preset": "tiny", "tied": True}, None),
    "not-nested": ({"preset": "tiny", "nested": False}, None),
    "sharded": ({"preset": "tiny", "shard_bytes": 300_000, "dtype_a_log": "bfloat16"}, 100_000),
}


def convert(source: Path, out: Path, limit: int | None) -> None:
    whole = mlx_lm.utils.make_shards
    if limit:  # the limit is in GiB there; this is its loop in bytes

        def make_shards(weights: dict[str, Any], _: int = 0) -> list[dict[str, Any]]:
            shards: list[dict[str, Any]] = []
            size = 0
            for name, value in weights.items():
                if not shards or size + value.nbytes > limit:
                    shards.append({})
                    size = 0
                shards[-1][name] = value
                size += value.nbytes
            return shards

        mlx_lm.utils.make_shards = make_shards
    try:
        mlx_lm.convert(str(source), str(out), quantize=True)
    finally:
        mlx_lm.utils.make_shards = whole


def main() -> None:
    mx.set_default_device(mx.cpu)
    work = Path(tempfile.mkdtemp(prefix="golden-"))
    cases = {}
    for name, (options, limit) in CASES.items():
        source = random_checkpoint.write(work / name, **options, form="published")
        source_config = file_digest(source / "config.json")
        if not options.get("nested", True):  # mlx-lm does not know the word for one not nested
            config = json.loads((source / "config.json").read_text("utf-8"))
            config["model_type"] = "qwen3_5_moe"
            (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        out = work / f"{name}-mlx"
        convert(source, out, limit)
        cases[name] = {
            "options": options, "limit": limit, "source_config": source_config, **digests(out)
        }  # fmt: skip
    versions = {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    whole = {"versions": versions, "cases": cases}
    (HERE / "quantized.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
