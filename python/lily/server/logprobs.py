"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def chat_logprob(logprob: Any) -> dict[str, Any]:
    """A `lily.TokenLogprob` as an entry of a chat's `logprobs.content`."""
    return {
        "token": logprob.text,
        "logprob": logprob.logprob,
        "bytes": list(logprob.bytes),
        "top_logprobs": [
            {"token": text, "logprob": value, "bytes": list(text.encode())}
            for _, text, value in logprob.top
        ],
    }


def completion_logprobs(logprobs: Iterable[Any], offset: int) -> dict[str, Any]:
    """`lily.TokenLogprob`s as a completion's `logprobs`, after `offset` characters of text."""
    entries = list(logprobs)
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{text: value for _, text, value in entry.top} for entry in entries],
        "text_offset": offsets,
    }
