"""How the next token is drawn from the logits: the options, their limits and their precedence."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from lily.errors import CheckpointError

BAN = -100.0
"""A logit bias at or below this bans its token outright."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of the sampler, checked when made.

    They apply in this order: logit bias and bans, penalties, temperature, top-k, top-p, min-p,
    draw. Repetition looks at all tokens of the session, presence and frequency at those generated
    since the last prompt.

    Where several sources give options, start with the weakest and merge the stronger over it:
    `Sampling.from_generation_config(config).merged(session_options).merged(call_options)`.

    Args:
        temperature: divides the logits, >= 0. 0 takes the best token, whatever the options after
            it say; of equals, the one with the lowest id.
        top_k: keep the k best tokens. 0, or more than the vocabulary, keeps all.
        top_p: keep the fewest best tokens whose probabilities reach this sum, in [0, 1].
            0 keeps only the best, 1 all.
        min_p: keep the tokens at least this likely, relative to the best, in [0, 1]. 0 keeps all.
        seed: in [0, 2^64); the same seed draws the same tokens on the same device and build.
            None draws a new seed for each call.
        repetition_penalty: logits of tokens seen, prompt included, are divided by it if positive,
            multiplied if not, >= 0. 1 has no effect; 0, which some clients send, becomes 1.
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted from the logits of generated tokens, once for each time.
        logit_bias: token id -> number added to its logit. -100 or less, -inf included, bans it.

    Raises:
        ValueError: an option has the wrong type or is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        seed = None if self.seed is None else _integer("seed", self.seed, 2**64 - 1)
        checked: dict[str, object] = {
            "temperature": _number("temperature", self.temperature, low=0),
            "top_k": _integer("top_k", self.top_k),
            "top_p": _number("top_p", self.top_p, low=0, high=1),
            "min_p": _number("min_p", self.min_p, low=0, high=1),
            "seed": seed,
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, low=0)
            or 1.0,
            "presence_penalty": _number("presence_penalty", self.presence_penalty),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty),
            "logit_bias": _bias(self.logit_bias),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        default = {f.name: f.default for f in fields(self)} | {"logit_bias": {}}
        options = [f"{k}={v!r}" for k, v in given.items() if v != default[k]]
        return f"Sampling({', '.join(options)})"

    @classmethod
    def greedy(cls) -> Sampling:
        """The best token at each step: no chance, no penalties."""
        return cls(temperature=0.0)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Sampling:
        """The options that a checkpoint recommends in its `generation_config.json`.

        `do_sample` false means greedy. Absent options, and those set to null, keep lily's
        defaults; entries that are not about sampling are left alone.

        Raises:
            CheckpointError: an option is out of range.
        """
        options = {name: config[name] for name in OPTIONS if name in config}
        if config.get("do_sample") is False:
            options["temperature"] = 0.0
        try:
            return cls().merged(options)
        except ValueError as error:
            raise CheckpointError(f"generation_config.json: {error}") from None

    def merged(self, overrides: Mapping[str, Any]) -> Sampling:
        """These options with `overrides` put over them; None means "not given".

        Raises:
            ValueError: an option is unknown (the message suggests what was meant) or out of range.
        """
        for name in overrides:
            if name not in OPTIONS:
                raise ValueError(f"{name}: unknown sampling option, {_suggestion(name)}")
        return replace(self, **{k: v for k, v in overrides.items() if v is not None})

    @property
    def is_greedy(self) -> bool:
        """Whether the pick is simply the best token after bias and penalties: no random number."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def banned_ids(self) -> frozenset[int]:
        """The ids that must not be drawn, as `logit_bias` says."""
        return frozenset(id for id, bias in self.logit_bias.items() if bias <= BAN)


OPTIONS = tuple(option.name for option in fields(Sampling))
"""Names of all sampling options."""


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, OPTIONS, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(OPTIONS)}"


def _number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and low <= number <= high:
            return number
    raise ValueError(f"{name}: {value!r}, expected a number{_range(low, high)}")


def _integer(name: str, value: object, high: float = math.inf) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= high:
        return int(value)
    raise ValueError(f"{name}: {value!r}, expected an integer{_range(0, high)}")


def _range(low: float, high: float) -> str:
    if high < math.inf:
        return f" in [{low}, {high}]"
    return f" >= {low}" if low > -math.inf else ""


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias: {value!r}, expected a mapping of token id to number")
    return {
        _integer("logit_bias id", id): -math.inf
        if bias == -math.inf
        else _number(f"logit_bias[{id}]", bias)
        for id, bias in value.items()
    }
