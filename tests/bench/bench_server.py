#!/usr/bin/env python3
"""What the server adds to each token: a streamed reply over HTTP beside the same call in-process.

    python tests/bench/bench_server.py [CHECKPOINT] [--rounds N] [--tokens N]

Rounds alternate. A token's time is that of the whole reply after its first token, divided by the
tokens after it; both sides draw the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

import lily

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from server.running import running  # noqa: E402

MESSAGES = [{"role": "user", "content": "Tell of the Count and his ship."}]


def in_process(model: lily.Model, tokens: int) -> float:
    """Seconds for each token after the first."""
    with model.chat(MESSAGES, max_tokens=tokens, temperature=0, thinking=True) as reply:
        times = [time.perf_counter() for piece in reply if piece.token is not None]
    return (times[-1] - times[0]) / (len(times) - 1)


def over_http(client: httpx.Client, tokens: int) -> float:
    """Seconds for each token after the first, as a client sees them."""
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "temperature": 0,
        "thinking": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    usage = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"] and not chunk["choices"][0]["delta"].get("role"):
                last = time.perf_counter()
                first = first or last
    return (last - first) / (usage["completion_tokens"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", default=ROOT / "examples/demo_model/checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    inside, outside = [], []
    with lily.Model.load(args.checkpoint) as model, running(model) as server:
        for round in range(args.rounds + 1):
            pair = in_process(model, args.tokens), over_http(server.client, args.tokens)
            if round:  # the first warms up
                inside.append(pair[0] * 1e3)
                outside.append(pair[1] * 1e3)
    for name, found in (("in-process", inside), ("over HTTP", outside)):
        low, high = min(found), max(found)
        print(f"{name:12} {statistics.median(found):.3f} ms a token ({low:.3f}…{high:.3f})")
    added = [over - within for within, over in zip(inside, outside, strict=True)]
    print(
        f"{'added':12} {statistics.median(added):.3f} ms a token (median of {args.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
