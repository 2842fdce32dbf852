"""How fast a model runs, alone or beside other engines: the work behind `lily bench`.

What is measured, for each engine, in each round:

* prefill of n tokens: the engine forgets everything; the clock then runs from handing over n
  token ids until the logits after the last one are on the host. tok/s = n / seconds.
* decode after n tokens: right after that prefill, greedy tokens are drawn, end-of-text tokens
  included, so that the number of steps is fixed. The clock runs from the first drawn token to the
  last; tok/s = steps / seconds. The first token belongs to the prefill.

How:

* Prompts are random ids that all engines have. They differ from round to round and are the same
  for every engine of a round.
* All engines are loaded before the first round and stay loaded; memory must suffice for all.
  Each peer has a process of its own. One engine works at a time, after a short rest in which the
  threads of the one before fall asleep.
* Engines take turns within each round, and each round starts with another one, so that drift of
  the machine (heat, neighbours) falls on all.
* One untimed round comes first: it pays for plans, kernels and page faults.
* Reported are the median and the range over the rounds; every single round is in the JSON.
* Nothing else is timed: no text, no tokenizer, no sampling.
* Beside the time, lily says how long the device worked of it, on the device's own clock.

The number of distinct tokens drawn is recorded: a model with random weights may repeat itself,
and a loop of few tokens touches few experts.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lily.bench_peers import peak_bytes
from lily.stages import Pass
from lily.workers import PEERS as PEERS
from lily.workers import About, Peer, Process
from lily.workers import PeerError as PeerError
from lily.workers import peers as peers

Measure = Literal["prefill", "decode"]

CSV_COLUMNS = (
    "date", "cpu", "os", "engine", "version", "model", "detail", "measure", "tokens", "steps",
    "round", "seconds", "device_s", "tok_s",
)  # fmt: skip

REST_S = 0.3
"""Seconds of rest before an engine's turn."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Args:
        contexts: decode is measured after so many tokens, and prefill of them with it.
        prefill: tokens of one more prefill measurement.
        decode: tokens drawn after the first.
        rounds: timed rounds.
        seed: of the random prompts.
        rest_s: seconds before each turn.
    """

    contexts: tuple[int, ...] = (256, 1024, 4096)
    prefill: int = 512
    decode: int = 128
    rounds: int = 5
    seed: int = 0
    rest_s: float = REST_S

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError("contexts: expected one or more, each at least 1")

    @property
    def context(self) -> int:
        """Tokens that a session must hold."""
        return max(self.prefill, *self.contexts) + self.decode + 1

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """(prompt tokens, decode steps) of the turns in a round."""
        wanted = dict.fromkeys(sorted(set(self.contexts)), self.decode)
        wanted.setdefault(self.prefill, 0)
        return tuple(sorted(wanted.items()))


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn; `drawn` counts the distinct tokens of its decode steps.

    The device worked `prefill_device_s` and `decode_device_s` of them, where that is known.
    """

    prefill_s: float
    decode_s: float
    drawn: int
    prefill_device_s: float | None = None
    decode_device_s: float | None = None


class Engine(Protocol):
    about: About

    def turn(self, tokens: Sequence[int], steps: int) -> Turn:
        """Forget everything, take `tokens`, then draw one token and `steps` more, greedily."""

    def peak_bytes(self) -> int:
        """Most memory its process has held."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Sample:
    """One measurement of one round."""

    round: int
    engine: str
    measure: Measure
    tokens: int
    steps: int
    seconds: float
    tok_s: float
    distinct_tokens: int | None = None
    device_s: float | None = None


@dataclass(frozen=True)
class Summary:
    """Tokens per second over the rounds."""

    engine: str
    measure: Measure
    tokens: int
    median: float
    min: float
    max: float


@dataclass
class Report:
    """All that was measured.

    Attributes:
        engines: what ran, with peak memory in bytes.
        absent: peer -> why it did not run, or did not finish.
        stages: where the first engine's time goes, if that was asked for.
    """

    options: Options
    engines: list[tuple[About, int]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    stages: list[Pass] = field(default_factory=list)

    def summary(self) -> list[Summary]:
        """Medians and ranges, by measure, tokens and engine."""
        groups: dict[tuple[Measure, int, str], list[float]] = {}
        for s in self.samples:
            groups.setdefault((s.measure, s.tokens, s.engine), []).append(s.tok_s)
        order = {about.name: i for i, (about, _) in enumerate(self.engines)}
        keys = sorted(groups, key=lambda k: (k[0] != "prefill", k[1], order.get(k[2], 99)))
        return [
            Summary(
                engine=engine,
                measure=measure,
                tokens=tokens,
                median=statistics.median(values := groups[measure, tokens, engine]),
                min=min(values),
                max=max(values),
            )
            for measure, tokens, engine in keys
        ]

    def to_json(self) -> dict[str, Any]:
        """A plain object for `json.dump`."""
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": self.machine,
            "options": asdict(self.options),
            "engines": [asdict(about) | {"peak_bytes": peak} for about, peak in self.engines],
            "absent": self.absent,
            "summary": [asdict(row) for row in self.summary()],
            "rounds": [asdict(sample) for sample in self.samples],
            "stages": [one.to_json() for one in self.stages],
        }

    def csv(self) -> str:
        """A line for each measurement of each round, for spreadsheets and plots."""
        about = {engine.name: engine for engine, _ in self.engines}
        day = time.strftime("%Y-%m-%d", time.gmtime())
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for s in self.samples:
            engine = about[s.engine]
            writer.writerow(
                [
                    day, self.machine.get("cpu"), self.machine.get("os"), s.engine, engine.version,
                    engine.model, engine.detail, s.measure, s.tokens, s.steps, s.round,
                    f"{s.seconds:.6f}", "" if s.device_s is None else f"{s.device_s:.6f}",
                    f"{s.tok_s:.3f}",
                ]
            )  # fmt: skip
        return table.getvalue()

    def busy(self) -> str:
        """How much of the time the first engine's device worked; "" where that is not known.

        A decode step begins before the token of the one before it has been seen, so a short run
        may count a step more than it times.
        """
        shares: dict[tuple[Measure, int], list[float]] = {}
        for s in self.samples:
            if s.device_s is not None and s.engine == self.engines[0][0].name:
                shares.setdefault((s.measure, s.tokens), []).append(
                    min(1.0, s.device_s / s.seconds)
                )
        cells = [
            f"{'prefill' if measure == 'prefill' else 'decode after'} {tokens}:"
            f" {statistics.median(found):.0%}"
            for (measure, tokens), found in sorted(shares.items(), key=lambda i: i[0][1])
        ]
        return f"the device was busy: {', '.join(cells)}" if cells else ""

    def table(self) -> str:
        """The summary for reading; a peer's column ends with lily's speed over its own."""
        names = [about.name for about, _ in self.engines]
        cells = {(s.measure, s.tokens, s.engine): s for s in self.summary()}
        rows = [["tok/s, median (range)", *names]]
        for measure, tokens in dict.fromkeys((m, t) for m, t, _ in cells):
            label = f"prefill {tokens}" if measure == "prefill" else f"decode after {tokens}"
            own = cells.get((measure, tokens, names[0]))
            row = [label]
            for name in names:
                cell = cells.get((measure, tokens, name))
                text = "–" if cell is None else _cell(cell)
                if cell and own and cell is not own:
                    text += f"  {own.median / cell.median:.2f}×"
                row.append(text)
            rows.append(row)
        rows.append(["load, s", *(f"{about.load_s:.1f}" for about, _ in self.engines)])
        rows.append(["peak memory, GB", *(f"{peak / 1e9:.2f}" for _, peak in self.engines)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(names) > 1:
            lines.append(f"×: {names[0]}'s median over the peer's")
        lines += [busy] if (busy := self.busy()) else []
        lines += [f"{peer}: not measured: {reason}" for peer, reason in self.absent.items()]
        return "\n".join(lines)


def _cell(s: Summary) -> str:
    digits = 1 if s.median < 1000 else 0
    return f"{s.median:.{digits}f} ({s.min:.{digits}f}–{s.max:.{digits}f})"


def run(
    engines: Sequence[Engine],
    options: Options,
    *,
    status: Callable[[str], None] = lambda _: None,
    absent: Mapping[str, str] | None = None,
) -> Report:
    """Measure engines in alternating rounds. The first one's failure is raised, a peer's noted.

    Args:
        engines: loaded; the first is what the others are compared with.
        status: told what is being done.
        absent: peers that did not load, for the report.
    """
    report = Report(options, absent=dict(absent or {}), machine=machine())
    alive = list(engines)
    n_tokens = min(engine.about.n_tokens for engine in engines)
    for number in range(-1, options.rounds):
        rng = random.Random(f"{options.seed} {number}")
        for n, steps in options.turns:
            tokens = [rng.randrange(n_tokens) for _ in range(n)]
            first = max(number, 0) % len(alive)
            for engine in alive[first:] + alive[:first]:
                name = engine.about.name
                label = "warm-up" if number < 0 else f"round {number + 1} of {options.rounds}"
                status(f"{label}: {name}, {n} tokens")
                time.sleep(options.rest_s)
                try:
                    turn = engine.turn(tokens, steps)
                except PeerError as error:
                    if engine is engines[0]:
                        raise
                    report.absent[name] = str(error)
                    alive.remove(engine)
                    continue
                if number >= 0:
                    report.samples += samples(number, name, n, steps, turn)
    report.engines = [(engine.about, engine.peak_bytes()) for engine in engines]
    return report


def samples(number: int, engine: str, n: int, steps: int, turn: Turn) -> Iterator[Sample]:
    """What one turn says."""
    yield Sample(
        number, engine, "prefill", n, n, turn.prefill_s, n / turn.prefill_s,
        device_s=turn.prefill_device_s,
    )  # fmt: skip
    if steps:
        rate = steps / turn.decode_s
        yield Sample(
            number, engine, "decode", n, steps, turn.decode_s, rate, turn.drawn,
            device_s=turn.decode_device_s,
        )  # fmt: skip


# lily


class LilyEngine:
    """A loaded `lily.Model`, in this process."""

    def __init__(self, model: Any, context: int, name: str = "lily") -> None:
        from lily import __version__
        from lily.errors import CheckpointError
        from lily.sampling import Sampling

        info = model.info
        try:
            n_tokens = model.tokenizer.n_tokens
        except CheckpointError:
            n_tokens = info.config.vocab_size
        self._session = model.session(context)
        self._greedy = Sampling.greedy()
        self.about = About(
            name=name,
            version=__version__ + (f" ({commit})" if (commit := commit_of_lily()) else ""),
            model=info.source,
            detail=f"{info.device}, {info.precision}",
            n_tokens=n_tokens,
            load_s=info.load_s,
        )

    def turn(self, tokens: Sequence[int], steps: int) -> Turn:
        session = self._session
        session.reset()
        before = session.device_s
        start = time.perf_counter()
        session.prefill(tokens)
        prefilled = time.perf_counter()
        prefill_device_s = session.device_s - before
        if not steps:
            return Turn(prefilled - start, 0.0, 0, prefill_device_s)
        with session.stream(steps + 1, self._greedy, stop_ids=()) as stream:
            next(stream)
            before = session.device_s
            for _ in stream:
                pass
            decode_device_s = session.device_s - before
            if len(stream.tokens) != steps + 1:
                raise RuntimeError(f"drew {len(stream.tokens)} tokens, expected {steps + 1}")
            seconds = stream.last_token_at - stream.first_token_at
            drawn = len(set(stream.tokens))
            return Turn(prefilled - start, seconds, drawn, prefill_device_s, decode_device_s)

    def peak_bytes(self) -> int:
        return peak_bytes()

    def close(self) -> None:
        self._session.close()


def commit_of_lily() -> str | None:
    """The commit that lily was installed or runs from, if that is known."""
    with contextlib.suppress(Exception):
        text = importlib.metadata.distribution("lily").read_text("direct_url.json")
        return str(json.loads(text or "{}")["vcs_info"]["commit_id"])[:12]
    return commit_of(Path(__file__))


def commit_of(file: Path) -> str | None:
    """The commit of the work tree that tracks `file`, with "+" if it has changes."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(file.parent), *command],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


# Peers


class Worker(Process):
    """A peer in its own process that takes turns."""

    def __init__(self, peer: Peer, context: int) -> None:
        super().__init__(peer, {"work": "turns", "context": context})

    def turn(self, tokens: Sequence[int], steps: int) -> Turn:
        return Turn(**self.ask({"tokens": list(tokens), "steps": steps}))


# The machine


def machine() -> dict[str, Any]:
    """What ran the benchmark."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_model(),
        "physical_cores": physical_cores(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "python": platform.python_version(),
        "load_average": list(load) if load else None,
    }


def cpu_model() -> str:
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo().get("model name", [platform.machine()])[0]


def physical_cores() -> int | None:
    if sys.platform == "darwin":
        return int(sysctl("hw.physicalcpu") or 0) or None
    info = _cpuinfo()
    return len(set(zip(info.get("physical id", []), info.get("core id", []), strict=False))) or None


def sysctl(name: str) -> str:
    """A setting of macOS, "" if there is none."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpuinfo() -> dict[str, list[str]]:
    """Field -> its value for each processor."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), []).append(value.strip())
    return found
