#!/usr/bin/env python3
"""What the server adds to each token: a streamed reply over HTTP beside the same call in-process.

    python tests/bench/bench_server.py [CHECKPOINT] [--rounds N] [--tokens N] [--threads N]

Rounds alternate. A token's time is that of the whole reply after its first token, divided by the
tokens after it; both sides draw the same tokens. The last line is the processor time of the server
alone, with a scripted model that computes nothing: it holds on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

import lily

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from server.running import running  # noqa: E402
from server.scripted import ScriptedModel, piece  # noqa: E402

MESSAGES = [{"role": "user", "content": "Tell of the Count and his ship."}]


def in_process(model: lily.Model, tokens: int) -> float:
    """Seconds for each token after the first."""
    with model.chat(MESSAGES, max_tokens=tokens, temperature=0, thinking=True) as reply:
        times = [time.perf_counter() for piece in reply if piece.token is not None]
    return (times[-1] - times[0]) / (len(times) - 1)


def other_process(url: str) -> subprocess.Popen[str]:
    """A client, so that what it does is not counted as the server's."""
    command = [sys.executable, __file__, "--client", url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def over_http(client: subprocess.Popen[str], tokens: int) -> float:
    """Seconds for each token after the first, as a client in another process sees them."""
    assert client.stdin is not None and client.stdout is not None
    print(tokens, file=client.stdin, flush=True)
    return float(client.stdout.readline())


def be_client(url: str) -> None:
    """For each number on standard input: ask for so many tokens and print a token's seconds."""
    with httpx.Client(base_url=url, timeout=600) as client:
        for line in sys.stdin:
            print(ask(client, int(line)), flush=True)


def ask(client: httpx.Client, tokens: int) -> float:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "temperature": 0,
        "thinking": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times, drawn = [], 0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                if '"usage":' in line:
                    drawn = json.loads(line[6:])["usage"]["completion_tokens"]
    return (times[-3] - times[1]) / (drawn - 1)  # between role, and reason and usage


def pause(_: object) -> None:
    """A step of a scripted reply: time for a token, in which nothing is computed."""
    time.sleep(0.002)


def processor_time(tokens: int) -> float:
    """Seconds of processor time that a token costs the server, its model aside: what it can add at
    most, on a machine that has something else to do meanwhile."""
    steps = [pause, piece("word ")] * tokens
    with running(ScriptedModel(steps)) as server, other_process(server.url) as client:
        over_http(client, tokens)
        before = time.process_time()
        over_http(client, tokens)
        served = time.process_time() - before
    reply = ScriptedModel(steps).chat(messages=[])
    before = time.process_time()
    for _ in reply:
        pass
    return (served - (time.process_time() - before)) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", default=ROOT / "examples/demo_model/checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, help="of the model; leave cores for both sides")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    inside, outside = [], []
    if args.client:
        be_client(args.client)
        return
    with (
        lily.Model.load(args.checkpoint, threads=args.threads) as model,
        running(model) as server,
        other_process(server.url) as client,
    ):
        for round in range(args.rounds + 1):
            pair = in_process(model, args.tokens), over_http(client, args.tokens)
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
    print(
        f"{'processor':12} {processor_time(args.tokens) * 1e3:.3f} ms a token of the server's own"
    )


if __name__ == "__main__":
    main()
