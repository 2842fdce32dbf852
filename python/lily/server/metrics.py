"""What the server has done, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily.server.work import Work

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RATES = (5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 400.0)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        lines, total = _head(self._name, "histogram", self._text), 0
        for bound, count in zip([*self._bounds, "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self._name}_sum {self._sum}", f"{self._name}_count {total}"]


class Metrics:
    """Counts since the start. Belongs to the event loop."""

    def __init__(self) -> None:
        self._replies = dict.fromkeys(("finished", "refused", "failed", "cancelled"), 0)
        self._tokens = dict.fromkeys(("prompt", "reused", "generated", "reasoning"), 0)
        self._histograms = {
            "queued": Histogram("lily_queued_seconds", "Wait for a place", SECONDS),
            "first": Histogram("lily_first_token_seconds", "From place to first token", SECONDS),
            "speed": Histogram("lily_decode_tokens_per_second", "Speed of a reply", RATES),
        }

    def ended(self, work: Work) -> None:
        """Count a reply that is over."""
        done = work.finished
        if done is None:
            status = work.error.status_code if work.error else 0
            end = "cancelled" if not status else "refused" if status < 500 else "failed"
            self._replies[end] += 1
            return
        usage, timings = done.result.usage, done.result.timings
        self._replies["finished"] += 1
        for kind in self._tokens:
            self._tokens[kind] += getattr(usage, kind, 0)
        self._histograms["queued"].add(done.queued_s)
        self._histograms["first"].add(timings.first_token_s)
        if timings.decode_tok_s:
            self._histograms["speed"].add(timings.decode_tok_s)

    def text(self, running: int, waiting: int) -> str:
        """All of it, for a scraper."""
        lines = [
            *_head("lily_replies_running", "gauge", "Replies that run"),
            f"lily_replies_running {running}",
            *_head("lily_requests_waiting", "gauge", "Requests that wait for a place"),
            f"lily_requests_waiting {waiting}",
            *_head("lily_replies_total", "counter", "Replies that are over, by how they ended"),
            *(f'lily_replies_total{{end="{k}"}} {n}' for k, n in self._replies.items()),
            *_head("lily_tokens_total", "counter", "Tokens of finished replies"),
            *(f'lily_tokens_total{{kind="{k}"}} {n}' for k, n in self._tokens.items()),
        ]
        for histogram in self._histograms.values():
            lines += histogram.lines()
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}.", f"# TYPE {name} {kind}"]
