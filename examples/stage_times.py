"""Where the time goes: seconds of each kind of stage, in a prefill pass and in a decode step.

    python examples/stage_times.py CHECKPOINT [PROMPT_TOKENS]

Dispatches run one at a time here, so the total is more than that of an undisturbed pass.
"""

import sys
from collections import defaultdict

import lily

DECODE_STEPS = 8


class Times:
    """Seconds and dispatches of each kind of stage: "layer.3/experts" counts as "experts"."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.dispatches: defaultdict[str, int] = defaultdict(int)

    def add(self, stage: str, kernel: str, slots: object, seconds: float | None) -> None:
        if seconds is None:  # called before the dispatch, too
            return
        kind = stage.rpartition("/")[2]
        self.seconds[kind] += seconds
        self.dispatches[kind] += 1

    def table(self, title: str, passes: int) -> str:
        total = sum(self.seconds.values())
        lines = [f"{title:<14}{'dispatches':>12}{'ms':>10}{'share':>8}"]
        for kind, s in sorted(self.seconds.items(), key=lambda item: -item[1]):
            n = self.dispatches[kind] // passes
            lines.append(f"{kind:<14}{n:>12}{1000 * s / passes:>10.3f}{s / total:>8.1%}")
        n = sum(self.dispatches.values()) // passes
        lines.append(f"{'total':<14}{n:>12}{1000 * total / passes:>10.3f}")
        return "\n".join(lines)


def main() -> None:
    n_prompt = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    with lily.Model.load(sys.argv[1]) as model, model.session() as session:
        prompt = [i % 256 for i in range(n_prompt)]
        session.prefill(prompt)  # once to warm up
        session.reset()
        prefill, decode = Times(), Times()
        logits = session.observe(prompt, prefill.add, prefill=True)
        for _ in range(DECODE_STEPS):
            logits = session.observe([logits.argmax()], decode.add)
        print(model.info.device)
        print(prefill.table(f"prefill {n_prompt}", 1), end="\n\n")
        print(decode.table("decode", DECODE_STEPS))


if __name__ == "__main__":
    main()
