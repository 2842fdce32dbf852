#!/usr/bin/env python3
"""Many clients at one server, for a long time:

    python tests/soak.py [--minutes 30] [--clients 8] [--model FOLDER] [--json FILE]

Starts `lily serve` and talks to it with clients of several kinds at once: chats of several turns,
streamed and not, completions, tools, structured output, long prompts, and some that hang up. Every
whole reply is compared with the same request made alone, before. Says how many requests, errors and
differences there were, the p99 of /health, and how the server's memory went. Exit code 1 if a reply
differed, a request failed, /health took longer than 100 ms at the p99, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
HEALTH_MS = 100.0
GROWTH = 1.05  # of the last quarter's memory over the second quarter's
TEXT = (
    "It was late in the evening when the old man came to the house by the river, and nobody had "
    "seen him come. He asked for bread and for a place by the fire, and they gave him both. "
)

LAMP = {
    "type": "function",
    "function": {
        "name": "lamp",
        "description": "Switch the lamp.",
        "parameters": {
            "type": "object",
            "properties": {
                "on": {"type": "boolean"},
                "colour": {"type": "string", "enum": ["red", "green"]},
            },
            "required": ["on", "colour"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def requests(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Route and body of the requests, none of which leaves anything to chance."""
    made: list[tuple[str, dict[str, Any]]] = []

    def chat(messages: list[dict[str, Any]], max_tokens: int, **options: Any) -> None:
        body = {"messages": messages, "max_tokens": max_tokens, **options}
        made.append(("/v1/chat/completions", body))

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    words = ["river", "queen", "captain", "garden", "letter", "winter", "lantern", "orchard"]
    for word in words:
        told = [{"role": "system", "content": TEXT}, user(f"Tell me of the {word}.")]
        for turn in range(3):
            chat(list(told), rng.randint(8, 40), chat_template_kwargs={"enable_thinking": False})
            told += [{"role": "assistant", "content": f"A {word}."}, user(f"More, {turn}.")]
        chat(told, 60)  # thinks
        made.append(("/v1/completions", {"prompt": f"The {word}", "max_tokens": 24}))
        chat([user(f"A form about the {word}.")], 80, response_format=_schema(), thinking=False)
        once = {"tools": [LAMP], "tool_choice": "required", "parallel_tool_calls": False}
        chat([user(word)], 80, thinking=False, **once)
    for n in (20, 50, 85):
        chat([user(TEXT * n)], 8, thinking=False)
    return [(route, {**body, "temperature": 0, "reuse": "exact"}) for route, body in made]


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}


@dataclass
class Tally:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str) -> None:
        with self.lock:
            self.kinds[kind] += 1

    def fail(self, text: str) -> None:
        with self.lock:
            self.errors.append(text)


def whole(client: httpx.Client, route: str, body: dict[str, Any]) -> Any:
    """What a request says, without what differs each time."""
    answer = client.post(route, json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    message = choice.get("message") or {"text": choice["text"]}
    return _said(message, choice["finish_reason"])


def streamed(client: httpx.Client, route: str, body: dict[str, Any], leave_after: int = 0) -> Any:
    """The same, from a stream; or None where the client hangs up after so many events."""
    message: dict[str, Any] = {}
    reason = None
    with client.stream("POST", route, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        for n, line in enumerate(answer.iter_lines()):
            if leave_after and n >= leave_after:
                return None
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                reason = choice["finish_reason"] or reason
                _join(message, choice.get("delta") or {"text": choice.get("text", "")})
    return _said(message, reason)


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("text", "content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    calls = message.setdefault("tool_calls", [])
    for part in delta.get("tool_calls") or []:
        if part["index"] == len(calls):
            calls.append({"function": {"name": "", "arguments": ""}})
        for name, text in part["function"].items():
            if text:
                calls[part["index"]]["function"][name] += text


def _said(message: dict[str, Any], reason: str | None) -> Any:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    texts = [message.get(name) or "" for name in ("text", "content", "reasoning_content")]
    return (*texts, calls, reason)


def talk(base: str, seed: int, alone: list[Any], until: float, tally: Tally) -> None:
    rng = random.Random(seed)
    asked = requests(random.Random(0))
    with httpx.Client(base_url=base, timeout=600) as client:
        while time.monotonic() < until:
            i = rng.randrange(len(asked))
            route, body = asked[i]
            kind = rng.choice(("whole", "streamed", "streamed", "left"))
            try:
                if kind == "whole":
                    got = whole(client, route, body)
                else:
                    leave = rng.randint(1, 20) if kind == "left" else 0
                    got = streamed(client, route, body, leave)
            except httpx.HTTPStatusError as error:
                if error.response.status_code in (429, 503):
                    tally.count("asked to wait")
                    time.sleep(0.5)
                else:
                    tally.fail(f"{route}: {error}")
                continue
            except Exception as error:
                tally.fail(f"{route} {kind}: {error!r}")
                continue
            tally.count(kind)
            if got is not None and got != alone[i]:
                tally.fail(f"request {i} {kind}: {got!r}, alone {alone[i]!r}")


def watch(base: str, pid: int, until: float, tally: Tally) -> None:
    with httpx.Client(base_url=base, timeout=30) as client:
        while time.monotonic() < until:
            started = time.perf_counter()
            client.get("/health").raise_for_status()
            tally.health_ms.append(1000 * (time.perf_counter() - started))
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            tally.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
            time.sleep(0.25)


def serve(model: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lily", "serve", model, "--port", str(port)]
    command += ["--reuse-memory", "64MB"]  # full within minutes: it shall not look like a leak
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"lily serve ended with {process.returncode}")
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return process
    raise SystemExit("lily serve does not answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--json")
    args = parser.parse_args()
    base = f"http://127.0.0.1:{args.port}"
    process = serve(args.model, args.port)
    try:
        with httpx.Client(base_url=base, timeout=600) as client:
            alone = [whole(client, route, body) for route, body in requests(random.Random(0))]
        tally = Tally()
        until = time.monotonic() + 60 * args.minutes
        threads = [
            threading.Thread(target=talk, args=(base, seed, alone, until, tally), daemon=True)
            for seed in range(args.clients)
        ]
        threads.append(
            threading.Thread(target=watch, args=(base, process.pid, until, tally), daemon=True)
        )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        process.terminate()
        process.wait()
    return report(tally, args.json)


def report(tally: Tally, file: str | None) -> int:
    p99 = statistics.quantiles(tally.health_ms, n=100)[98]
    quarters = [
        max(tally.memory[k * len(tally.memory) // 4 : (k + 1) * len(tally.memory) // 4])
        for k in range(4)
    ]
    figures = {
        "requests": dict(tally.kinds),
        "errors": len(tally.errors),
        "health_p99_ms": round(p99, 1),
        "health_checks": len(tally.health_ms),
        "memory_mb_by_quarter": [round(q / 1e6, 1) for q in quarters],
    }
    print(json.dumps(figures, indent=2))
    for text in tally.errors[:20]:
        print("error:", text)
    if file:
        Path(file).write_text(json.dumps(figures, indent=2) + "\n")
    grew = quarters[3] > GROWTH * quarters[1]
    return int(bool(tally.errors) or p99 > HEALTH_MS or grew)


if __name__ == "__main__":
    sys.exit(main())
