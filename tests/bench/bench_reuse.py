"""Time to the first token of a conversation's last turn, warm and cold.

    python tests/bench/bench_reuse.py MODEL [--tokens 4000] [--turns 5] [--rounds 5] [--file]

A conversation is held whose last prompt has about so many tokens, most of them in its system
prompt. Its last turn is then asked warm (after the turns before it) and cold (`reuse="off"`), in
turn. `--file` also saves and loads a session of that prompt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lily

TEXT = "It was late in the evening when the carriage came, and nobody had lit the lamps. "


def conversation(model: lily.Model, tokens: int, turns: int) -> list[list[dict[str, str]]]:
    """The prompts of each turn: a long system prompt, then turns of a sentence each. The answers
    are made up, so that all rounds have the same."""
    n = len(model.encode(TEXT))
    system = TEXT * max(1, tokens // n - 2 * turns)
    talk: list[dict[str, str]] = [{"role": "system", "content": system}]
    prompts = []
    for turn in range(turns):
        talk.append({"role": "user", "content": f"{turn}. " + TEXT})
        prompts.append(list(talk))
        talk.append({"role": "assistant", "content": TEXT})
    return prompts


def first_token(model: lily.Model, prompt: Any, reuse: Any) -> lily.Result:
    return model.generate(prompt, max_tokens=1, temperature=0, thinking=False, reuse=reuse).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fast")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", action="store_true")
    args = parser.parse_args()

    def load() -> lily.Model:
        return lily.Model.load(args.model, args.device, args.precision, threads=args.threads)

    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with load() as model:
            *before, last = conversation(model, args.tokens, args.turns)
            first_token(model, before[0], "off")  # plans are recorded at first use
            cold = first_token(model, last, "off")
            for prompt in before:
                first_token(model, prompt, "exact")
            warm = first_token(model, last, "exact")
            assert warm.tokens == cold.tokens
            times["cold"].append(cold.timings.first_token_s)
            times["warm"].append(warm.timings.first_token_s)
            stats = model.reuse_stats()
    print(f"turn {args.turns} of {warm.usage.prompt} tokens, {warm.usage.reused} of them reused")
    for name, values in times.items():
        low, high = min(values), max(values)
        print(
            f"{name}  {1e3 * statistics.median(values):8.1f} ms  ({1e3 * low:.1f}…{1e3 * high:.1f})"
        )
    ratio = statistics.median(times["warm"]) / statistics.median(times["cold"])
    print(f"warm / cold  {100 * ratio:.1f} %")
    print(stats)
    if args.file:
        with load() as model:
            save_and_load(model, model.encode_chat(last))


def save_and_load(model: lily.Model, prompt: list[int]) -> None:
    session = model.session()
    session.prefill(prompt)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        started = time.perf_counter()
        session.save(path)
        saved = time.perf_counter()
        model.load_session(path)
        loaded = time.perf_counter()
        mb = os.path.getsize(path) / 1e6
    print(f"file of {mb:.1f} MB: save {saved - started:.3f} s, load {loaded - saved:.3f} s")


if __name__ == "__main__":
    main()
