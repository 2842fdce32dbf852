"""Where the time goes: seconds of each kind of stage, for `lily bench --stages`.

Dispatches run one at a time here, each in a command buffer of its own, so their sum is more than
what an undisturbed pass takes; what the pass takes less is what overlaps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lily.model import Model
    from lily.session import Session

DECODE_STEPS = 8


@dataclass
class Stage:
    """One kernel in one kind of stage, in one pass.

    Attributes:
        stage: "experts" stands for that stage of all layers.
        bytes: it is expected to move, for all its dispatches; 0 where that is not known.
    """

    stage: str
    kernel: str
    dispatches: float = 0
    seconds: float = 0.0
    bytes: float = 0

    def gb_s(self) -> float | None:
        return self.bytes / self.seconds / 1e9 if self.bytes and self.seconds else None


@dataclass
class Pass:
    """The stages of one pass, the most expensive first."""

    name: str
    stages: list[Stage]

    def to_json(self) -> dict[str, Any]:
        return {"pass": self.name, "stages": [asdict(s) | {"gb_s": s.gb_s()} for s in self.stages]}

    def table(self) -> str:
        total = sum(s.seconds for s in self.stages)
        lines = [
            f"{self.name:<38}{'dispatches':>10}{'µs':>10}{'share':>8}{'MB':>9}{'GB/s':>8}",
        ]
        for s in self.stages:
            rate = s.gb_s()
            lines.append(
                f"  {s.stage + ': ' + s.kernel:<36}{s.dispatches:>10.0f}{1e6 * s.seconds:>10.0f}"
                f"{s.seconds / total if total else 0:>8.1%}"
                + (f"{s.bytes / 1e6:>9.1f}{rate:>8.1f}" if rate else f"{'–':>9}{'–':>8}")
            )
        n = sum(s.dispatches for s in self.stages)
        lines.append(f"  {'in all':<36}{n:>10.0f}{1e6 * total:>10.0f}")
        return "\n".join(lines)


def measure(model: Model, prefill: int, context: int, seed: int = 0) -> list[Pass]:
    """The stages of a prefill of some tokens, and of a decode step after `context` others."""
    engine = model._live_engine()
    rng = random.Random(seed)
    tokens = [rng.randrange(model.n_tokens) for _ in range(max(prefill, context))]
    prompt = tokens[: min(prefill, engine.chunk)]
    with model.session(max(prefill, context) + DECODE_STEPS + 2) as session:
        _observed(session, prompt, True)  # kernels and page faults
        session.reset()
        passes = [_collected(f"prefill {len(prompt)}", 1, _observed(session, prompt, True))]
        session.reset()
        session.prefill(tokens[:context])
        _observed(session, tokens[:1], False)
        entries = engine.plan_entries("step", context + DECODE_STEPS + 2 <= 128)
        sizes = [n_bytes for _, _, n_bytes in entries]
        seen: list[tuple[str, str, float]] = []
        for _ in range(DECODE_STEPS):
            seen += _observed(session, tokens[:1], False)
        # Attention reads the cache, which a plan does not count.
        cache = model.info.memory.per_1000_tokens / 1000 * context
        layers = max(1, model.info.config.layer_types.count("full_attention"))
        if len(seen) == DECODE_STEPS * len(sizes):
            sizes = [
                n_bytes + int(cache / layers) * (kernel == "attend")
                for n_bytes, (_, kernel, _) in zip(sizes, entries, strict=True)
            ]
        else:  # a context on the border between two plans
            sizes = []
        name = f"decode after {context}"
        return [*passes, _collected(name, DECODE_STEPS, seen, sizes * DECODE_STEPS)]


def _observed(
    session: Session, tokens: Sequence[int], prefill: bool
) -> list[tuple[str, str, float]]:
    """Stage, kernel and seconds of each dispatch."""
    seen: list[tuple[str, str, float]] = []

    def observer(stage: str, kernel: str, _: object, seconds: float | None) -> None:
        if seconds is not None:
            seen.append((stage, kernel, seconds))

    session.observe(tokens, observer, prefill=prefill)
    return seen


def _collected(
    name: str, passes: int, seen: Sequence[tuple[str, str, float]], sizes: Sequence[int] = ()
) -> Pass:
    found: dict[tuple[str, str], Stage] = {}
    for i, (stage, kernel, seconds) in enumerate(seen):
        kind = stage.rpartition("/")[2]
        one = found.setdefault((kind, kernel), Stage(kind, kernel))
        one.dispatches += 1 / passes
        one.seconds += seconds / passes
        one.bytes += sizes[i] / passes if sizes else 0
    return Pass(name, sorted(found.values(), key=lambda s: -s.seconds))
