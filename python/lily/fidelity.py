"""How near engines are to a reference on the same weights: the work behind `lily fidelity`.

Every engine reads the same windows of token ids, cut as `lily.perplexity` cuts them, and gives
its logits after each token. A position is compared by its whole distribution, padding rows of the
vocabulary included:

* perplexity of the text, and by how much it is off the reference's;
* top-1: whether the likeliest token is the reference's, the lowest id of equals;
* KL(reference || engine) in nats;
* the largest difference of a logit.

The reference runs first, and its logits go to a temporary file of positions · V · 4 bytes. The
other engines then run one after another, each compared as it goes. So only one engine is in memory
at a time, and of the logits one piece of each side. Softmax and KL are taken in float64.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lily import bench
from lily.errors import Error
from lily.fidelity_engines import (
    FAST,
    Candidate,
    Engine,
    Rows,
    Status,
    lily_candidate,
    peer_candidate,
)
from lily.fidelity_engines import FLOAT32 as FLOAT32
from lily.fidelity_engines import PEERS as PEERS
from lily.perplexity import (
    WINDOW,
    blocks,
    check_window,
    exp,
    finite,
    log_sums,
    token_nats,
    windows,
)
from lily.workers import About, PeerError
from lily.workers import peers as find_peers

if TYPE_CHECKING:
    from lily.checkpoint import Checkpoint

PREFERRED = ("transformers", "mlx-lm", FLOAT32)
"""Which engine is the reference, if nothing else is asked for: the first that runs."""

POSITIONS = 10_000
FIRST = 192
"""Positions of the second group of figures."""

FAILURES = (PeerError, Error, OSError, MemoryError)


@dataclass(frozen=True)
class Options:
    """What is compared.

    Args:
        window: tokens of a window.
        positions: most positions that are compared.
        reference: an engine's name; None takes the first of PREFERRED that runs.
    """

    window: int = 2048
    positions: int = POSITIONS
    reference: str | None = None


@dataclass
class Measured:
    """One engine's figures for each position.

    Attributes:
        nats: -log p of the token that follows.
        same_top: whether the likeliest token is the reference's.
        kl: KL(reference || engine), in nats.
        difference: the largest |difference| of a logit.
        seconds: from handing over a window's tokens until its logits are on the host, in all.
    """

    about: About
    nats: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    kl: NDArray[np.float64]
    difference: NDArray[np.float64]
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """One engine's figures over a group of positions.

    Attributes:
        relative_perplexity: the engine's over the reference's, less 1.
        top1: share of positions with the reference's likeliest token.
        kl, kl_max: mean and largest KL(reference || engine), in nats.
        logit_difference: the largest |difference| of a logit.
    """

    engine: str
    perplexity: float
    nats_per_token: float
    relative_perplexity: float
    top1: float
    kl: float
    kl_max: float
    logit_difference: float


@dataclass(frozen=True)
class Group:
    """Figures over the first `positions` positions."""

    name: str
    positions: int
    rows: list[Row]


@dataclass
class Report:
    """All that was measured.

    Attributes:
        measured: the reference first.
        absent: engine -> why it did not run, or did not finish.
        model, text: what was read, for the record.
    """

    options: Options
    measured: list[Measured] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        return self.measured[0].about.name

    @property
    def positions(self) -> int:
        return len(self.measured[0].nats)

    def groups(self) -> list[Group]:
        """All positions, and the first FIRST if there are more."""
        n = self.positions
        found = [Group("all", n, self._rows(n))]
        if n > FIRST:
            found.append(Group(f"first {FIRST}", FIRST, self._rows(FIRST)))
        return found

    def _rows(self, n: int) -> list[Row]:
        base = _mean(self.measured[0].nats[:n])
        return [
            Row(
                engine=m.about.name,
                perplexity=exp(mean := _mean(m.nats[:n])),
                nats_per_token=mean,
                relative_perplexity=math.expm1(mean - base) if mean - base < 700 else math.inf,
                top1=int(m.same_top[:n].sum()) / n,
                kl=_mean(m.kl[:n]),
                kl_max=float(m.kl[:n].max()),
                logit_difference=float(m.difference[:n].max()),
            )
            for m in self.measured
        ]

    def to_json(self) -> dict[str, Any]:
        """A plain object for `json.dump`."""
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": bench.machine(),
            "model": self.model,
            "text": self.text,
            "window": self.options.window,
            "positions": self.positions,
            "reference": self.reference,
            "engines": [
                asdict(m.about) | {"seconds": m.seconds, "tok_s": finite(_rate(m))}
                for m in self.measured
            ],
            "absent": self.absent,
            "groups": [
                {
                    "name": group.name,
                    "positions": group.positions,
                    "rows": [
                        {key: finite(value) for key, value in asdict(row).items()}
                        for row in group.rows
                    ],
                }
                for group in self.groups()
            ],
        }

    def table(self) -> str:
        """The figures for reading."""
        head = ["", "perplexity", "off by", "top-1", "mean KL", "max KL", "max |Δlogit|"]
        cells: list[list[str]] = [head]
        titles: dict[int, str] = {}
        for group in self.groups():
            titles[len(cells)] = f"{group.name}: {group.positions:,} positions"
            cells += [_cells(row, self.reference) for row in group.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for i, row in enumerate(cells):
            lines += [titles[i]] if i in titles else []
            numbers = (f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *numbers]).rstrip())
        lines += [
            "",
            f"windows of {self.options.window:,} tokens; KL in nats, against the reference",
        ]
        lines += [
            f"{m.about.name}: {m.about.version}; {m.about.detail}; {_rate(m):.1f} tok/s"
            for m in self.measured
        ]
        lines += [f"{name}: not measured: {reason}" for name, reason in self.absent.items()]
        return "\n".join(lines)


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist()) / len(values)


def _rate(m: Measured) -> float:
    return len(m.nats) / m.seconds if m.seconds else math.inf


def _cells(row: Row, reference: str) -> list[str]:
    own = [f"  {row.engine}", f"{row.perplexity:.4f}"]
    if row.engine == reference:
        return [*own, "reference", "", "", "", ""]
    off = 100 * row.relative_perplexity
    return [
        *own,
        f"{off:+.1e} %" if 0 < abs(off) < 1e-3 else f"{off:+.4f} %",
        f"{100 * row.top1:.2f} %",
        *(f"{x:.1e}" if x else "0" for x in (row.kl, row.kl_max, row.logit_difference)),
    ]


# Comparing


def run(
    candidates: Sequence[Candidate],
    tokens: NDArray[np.uint32],
    n_vocabulary: int,
    options: Options,
    *,
    status: Status = lambda _: None,
    absent: Mapping[str, str] | None = None,
) -> Report:
    """Compare engines with a reference. A failure of `lily fast`, or of a reference that was asked
    for by name, is raised; any other is noted.

    Args:
        candidates: each loaded when its turn comes, and closed after it.
        tokens: the text's ids.
        n_vocabulary: V, the same for all.
        status: told what is being done.
        absent: engines that could not be had, for the report.

    Raises:
        ValueError: fewer than two tokens, or an option is out of range.
        Error: no engine can be the reference, or the disk has no room for its logits.
    """
    spans = windows(len(tokens), options.window, options.positions)
    positions = sum(stop - start - 1 for start, stop in spans)
    _check_space(4 * positions * n_vocabulary, positions)
    report = Report(options, absent=dict(absent or {}))
    by_name = {candidate.name: candidate for candidate in candidates}
    wanted = PREFERRED if options.reference is None else (options.reference,)
    with tempfile.TemporaryFile() as kept:
        work = _Work(tokens, spans, positions, n_vocabulary, kept, status)
        for name in [name for name in wanted if name in by_name]:
            candidate = by_name.pop(name)
            if _attempt(report, candidate, work, as_reference=True):
                break
        else:
            reasons = "; ".join(f"{n}: {report.absent[n]}" for n in wanted if n in report.absent)
            raise Error(f"no reference: {reasons or 'none of ' + ', '.join(wanted)}")
        for candidate in by_name.values():
            _attempt(report, candidate, work, as_reference=False)
    return report


def _attempt(report: Report, candidate: Candidate, work: _Work, *, as_reference: bool) -> bool:
    """Run one engine; whether it finished."""
    name = candidate.name
    try:
        work.status(f"{name}: loading")
        engine = candidate.load(work.status)
        with contextlib.closing(engine):
            report.measured.append(work.measure(engine, as_reference=as_reference))
    except FAILURES as error:
        if name == FAST:
            raise
        report.absent[name] = str(error).partition("\n")[0] or type(error).__name__
        return False
    return True


@dataclass(frozen=True)
class _Work:
    """The text, and the file that holds the reference's logits of each position in turn."""

    tokens: NDArray[np.uint32]
    spans: Sequence[tuple[int, int]]
    positions: int
    n_vocabulary: int
    kept: IO[bytes]
    status: Status

    def measure(self, engine: Engine, *, as_reference: bool) -> Measured:
        """Run `engine` over all windows; the reference is kept, another compared with it."""
        n = self.positions
        found = Measured(engine.about, np.empty(n), np.ones(n, np.bool_), np.zeros(n), np.zeros(n))
        self.kept.seek(0)
        done = 0
        for start, stop in self.spans:
            targets = self.tokens[start + 1 : stop]
            at = 0
            started = time.perf_counter()
            for rows in engine.logits(self.tokens[start : stop - 1], self.n_vocabulary):
                found.seconds += time.perf_counter() - started
                if rows.shape[1] != self.n_vocabulary:
                    raise PeerError(f"{rows.shape[1]} logits a token, expected {self.n_vocabulary}")
                if at + len(rows) > len(targets):
                    raise PeerError(f"more than {len(targets)} rows of logits for a window")
                here = slice(done, done + len(rows))
                wanted = targets[at : at + len(rows)]
                if as_reference:
                    np.ascontiguousarray(rows, np.float32).tofile(self.kept)
                    found.nats[here] = token_nats(rows, wanted)
                else:
                    self._compare(rows, wanted, found, done)
                at += len(rows)
                done += len(rows)
                bad = np.flatnonzero(~np.isfinite(found.nats[here]))
                if bad.size:
                    where = done - len(rows) + int(bad[0])
                    raise Error(f"position {where}: logits that are not finite")
                self.status(f"{engine.about.name}: {done:,} of {n:,} positions")
                started = time.perf_counter()
            if at != len(targets):
                raise PeerError(f"{at} rows of logits for a window, expected {len(targets)}")
        return found

    def _compare(self, rows: Rows, targets: NDArray[np.uint32], found: Measured, at: int) -> None:
        reference = np.fromfile(self.kept, np.float32, rows.size).reshape(rows.shape)
        found.same_top[at : at + len(rows)] = rows.argmax(1) == reference.argmax(1)
        for block in blocks(rows):
            x, y = reference[block].astype(np.float64), rows[block].astype(np.float64)
            here = slice(at + block.start, at + block.start + len(y))
            sums = log_sums(y)
            found.nats[here] = sums - y[np.arange(len(y)), targets[block]]
            with np.errstate(invalid="ignore"):  # infinities show as nats that are not finite
                found.difference[here] = np.abs(x - y).max(1)
                x -= log_sums(x)[:, None]
                y -= sums[:, None]
                found.kl[here] = (np.exp(x) * (x - y)).sum(1)


def _check_space(n_bytes: int, positions: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise Error(
            f"{folder}: {free / 1e9:.1f} GB free, expected {n_bytes / 1e9:.1f} GB for the"
            f" reference's logits at {positions:,} positions",
            hint="fewer --positions, or another folder in TMPDIR",
        )


# The whole of it


def measure(
    source: str,
    text: str,
    *,
    window: int | None = None,
    positions: int = POSITIONS,
    reference: str | None = None,
    wanted: Sequence[str] = ("auto",),
    models: Mapping[str, str] | None = None,
    pythons: Mapping[str, str] | None = None,
    device: str = "auto",
    threads: int | None = None,
    memory_limit: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    status: Status = lambda _: None,
) -> Report:
    """Compare lily in both precisions, and peers, on a text.

    Args:
        source: a folder, or "org/name" on the Hugging Face hub.
        text: what is scored.
        window: tokens of a window; None is 2,048, or what the model was trained for if less.
        positions: most positions that are compared.
        reference: "lily float32" or a peer; None takes the first of PREFERRED that runs.
        wanted: peers by name, or "auto" for those that are installed.
        models, pythons: by peer: what it loads instead of the model, the Python that it is in.
        device, threads, memory_limit, revision, offline, progress: as for `Model.load`.
        status: told what is being done.
    """
    from lily.checkpoint import TOKENIZER, open_checkpoint, resolve
    from lily.tokenizer import Tokenizer

    folder, commit = resolve(source, revision, offline, progress)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if window is None:
        window = min(WINDOW, config.max_position_embeddings)
    check_window(window, config.max_position_embeddings)
    tokenizer = Tokenizer(checkpoint.tokenizer or folder / TOKENIZER)
    tokens = np.array(tokenizer.encode(text), np.uint32)
    windows(len(tokens), window, positions)  # refuses what cannot be scored

    models = models or {}
    if reference in PEERS:
        wanted = [*wanted, reference]
    peers, absent = find_peers(
        wanted,
        str(folder),
        models,
        pythons or {},
        threads=threads or bench.physical_cores(),
        cpu=True,
        names=PEERS,
    )
    options: dict[str, Any] = {
        "device": device,
        "context": window,
        "threads": threads,
        "memory_limit": memory_limit,
        "progress": progress,
    }
    candidates = [lily_candidate(name, window, str(folder), **options) for name in (FAST, FLOAT32)]
    for peer in peers:
        own = peer.name in models
        if peer.name == "mlx-lm" and checkpoint.form == "published" and not own:
            absent[peer.name] = "it rounds norm weights of the published form to bf16"
            continue
        candidates.append(peer_candidate(peer, window, checkpoint, own=own, progress=progress))
    report = run(
        candidates,
        tokens,
        config.vocab_size,
        Options(window, positions, reference),
        status=status,
        absent=absent,
    )
    about = {"source": source, "folder": str(folder), "revision": commit, "form": checkpoint.form}
    report.model = about | fingerprint(checkpoint, status)
    data = text.encode()
    report.text = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "tokens": len(tokens),
    }
    return report


# What was read


def fingerprint(checkpoint: Checkpoint, status: Status = lambda _: None) -> dict[str, Any]:
    """SHA-256 of each weights file, and one over them all."""
    files = {}
    for path in checkpoint.files:
        status(f"reading {path.name}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    lines = "".join(f"{f['sha256']}  {name}\n" for name, f in sorted(files.items()))
    return {"fingerprint": hashlib.sha256(lines.encode()).hexdigest(), "files": files}
