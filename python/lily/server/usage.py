"""Counts, times and circumstances of a reply, as the API shows them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lily.sampling import BAN, Sampling
from lily.server.work import Finished


def usage(result: Any) -> dict[str, Any]:
    """OpenAI's `usage`: every count is there, 0 too."""
    counts = result.usage
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.reused},
        "completion_tokens_details": {"reasoning_tokens": getattr(counts, "reasoning", 0)},
    }


def extras(done: Finished, sampling: Sampling) -> dict[str, Any]:
    """lily's additions: `timings`, and how the reply came about."""
    result = done.result
    return {
        "timings": {"queued_s": done.queued_s, **asdict(result.timings)},
        "lily": {
            "seed": result.seed,
            "stop": result.stop,
            "thinking_end": getattr(result, "thinking_end", None),
            "reuse_note": result.usage.reuse_note,
            "sampling": sampling_options(sampling),
        },
    }


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The options as a request would give them."""
    bias = {str(id): max(value, BAN) for id, value in sampling.logit_bias.items()}
    return asdict(sampling) | {"logit_bias": bias}
