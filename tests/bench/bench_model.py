"""lily beside llama.cpp, both fed the same random tokens, in alternating rounds.

    python tests/bench/bench_model.py MODEL --gguf mid-q4km.gguf --llama-python .llama/bin/python

`lily bench` lets each engine draw its own greedy tokens. Here both decode tokens from a random
stream instead, so neither can profit from a text that repeats itself and touches few experts:
every step of both engines computes logits and hands them to the host. lily's pipelined greedy
stream, which is how it runs in practice, is measured as well.

llama.cpp runs in its own process and Python (`peer_llama_cpp.py run --step`), stays loaded, and
works only when asked. One more round comes first and is not counted. Rounds start with lily and
with llama.cpp in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lily
from lily import bench

HERE = Path(__file__).resolve().parent
SHORT_PROMPT = 16  # as peer_llama_cpp.py has it: tokens before decoding is timed


class Lily:
    """lily's side of a round."""

    def __init__(self, model: lily.Model, prompt: int, decode: int, seed: int) -> None:
        self._model, self._prompt, self._decode = model, prompt, decode
        self._rng = random.Random(seed)
        self._session = model.session(max(prompt, SHORT_PROMPT + decode) + 1)

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(self._model.tokenizer.n_tokens) for _ in range(n)]

    def round(self) -> dict[str, float]:
        """tok/s of a prompt from nothing, of given tokens one by one, of a greedy stream."""
        session, n = self._session, self._decode
        text = self._tokens(self._prompt)
        session.reset()
        start = time.perf_counter()
        session.prefill(text)
        prefill = time.perf_counter() - start

        short, steps = self._tokens(SHORT_PROMPT), self._tokens(n)
        session.reset()
        session.prefill(short)
        start = time.perf_counter()
        for token in steps:
            session.decode(token)
        decode = time.perf_counter() - start

        session.reset()
        session.prefill(short)
        with session.stream(n + 1, lily.Sampling.greedy(), stop_ids=()) as stream:
            for _ in stream:
                pass
        greedy = stream.last_token_at - stream.first_token_at
        return {
            "prefill_tok_s": self._prompt / prefill,
            "decode_tok_s": n / decode,
            "greedy_tok_s": n / greedy,
        }


class LlamaCpp:
    """llama.cpp's side: a process that does one round for each line it is sent."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = {
            "prompt": args.prefill,
            "decode": args.decode,
            "rounds": args.rounds + 1,
            "threads": args.threads,
            "seed": args.seed,
        }
        command = [args.llama_python, str(HERE / "peer_llama_cpp.py"), "run", str(args.gguf)]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [*command, "--step"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> dict[str, float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        stdin.write("\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            sys.exit(f"llama.cpp ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return {name: found[name] for name in ("prefill_tok_s", "decode_tok_s")}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def rounds(ours: Lily, theirs: LlamaCpp, n: int) -> Iterator[dict[str, dict[str, float]]]:
    """Both engines' numbers, round by round."""
    ours.round()
    for number in range(n):
        turns: list[tuple[str, Lily | LlamaCpp]] = [("lily", ours), ("llama.cpp", theirs)]
        found = {}
        for name, engine in turns if number % 2 == 0 else reversed(turns):
            time.sleep(bench.REST_S)
            found[name] = engine.round()
            shown = "  ".join(f"{key} {value:.1f}" for key, value in found[name].items())
            print(f"round {number + 1}  {name:<10}{shown}", file=sys.stderr)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=bench.physical_cores() or 1)
    parser.add_argument("--precision", choices=("fast", "float32"), default="fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    theirs = LlamaCpp(args)
    try:
        theirs.round()  # loads and warms up before lily is measured
        with lily.Model.load(
            args.model, device="cpu", precision=args.precision, threads=args.threads
        ) as model:
            ours = Lily(model, args.prefill, args.decode, args.seed)
            found = list(rounds(ours, theirs, args.rounds))
    finally:
        theirs.close()

    def middle(engine: str, key: str) -> float:
        return statistics.median(round[engine][key] for round in found)

    print(f"{'tok/s, median (range)':<26}{'lily':<24}{'llama.cpp':<24}ratio")
    for label, key, peer_key in (
        (f"prefill {args.prefill}", "prefill_tok_s", "prefill_tok_s"),
        ("decode, same tokens", "decode_tok_s", "decode_tok_s"),
        ("decode, greedy stream", "greedy_tok_s", "decode_tok_s"),
    ):
        cells = []
        for engine, name in (("lily", key), ("llama.cpp", peer_key)):
            values = [round[engine][name] for round in found]
            cells.append(f"{middle(engine, name):.1f} ({min(values):.1f}–{max(values):.1f})")
        ratio = middle("lily", key) / middle("llama.cpp", peer_key)
        print(f"{label:<26}{cells[0]:<24}{cells[1]:<24}{ratio:.2f}×")
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        report = {
            "machine": bench.machine(),
            "commit": bench.commit_of(Path(__file__)),
            "options": options,
            "rounds": found,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
