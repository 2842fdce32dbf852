"""The model's configuration: what config.json says, checked once, then trusted.

`parse_config` knows every field that changes the computation. It refuses, by name, values
that lily does not implement, and numbers that no member of the family could have, so that
code after it multiplies dimensions without a second look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lily.errors import CheckpointError
from lily.files import is_int, show

LINEAR_ATTENTION: Final = "linear_attention"
FULL_ATTENTION: Final = "full_attention"

_NESTED: Final = "qwen3_5_moe"
_FLAT: Final = "qwen3_5_moe_text"
_RELATIVES: Final[Mapping[str, str]] = {
    "qwen3_5": "a dense sibling, not supported yet",
    "qwen3_5_text": "a dense sibling, not supported yet",
    "qwen3_next": "stores its projections in another layout, not supported",
    "qwen4_exp": "another architecture, not supported",
}

# Caps far above the largest member of the family; products of any few stay below 2^63.
_CAPS: Final[Mapping[str, int]] = {
    "hidden_size": 1 << 16,
    "num_hidden_layers": 1 << 10,
    "vocab_size": 1 << 22,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 256,
    "linear_num_key_heads": 1 << 10,
    "linear_num_value_heads": 1 << 10,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 256,
    "linear_conv_kernel_dim": 16,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 8,
    "moe_intermediate_size": 1 << 16,
    "shared_expert_intermediate_size": 1 << 16,
    "max_position_embeddings": 1 << 26,
}


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions and constants of the text model, under config.json's names.

    `rotary_dim` is how many values of each attention head are rotated; `layer_types` holds
    "linear_attention" (Gated DeltaNet) or "full_attention" for each layer.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    norm_topk_prob: bool
    layer_types: tuple[str, ...]

    @property
    def conv_channels(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def n_parameters(self) -> int:
        """Weights of the text model, each counted once (a tied head adds none)."""
        hidden, experts = self.hidden_size, self.num_experts
        values = self.linear_num_value_heads * self.linear_value_head_dim
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        delta_net = (
            hidden * (self.conv_channels + values + 2 * self.linear_num_value_heads)
            + self.conv_channels * self.linear_conv_kernel_dim
            + 2 * self.linear_num_value_heads  # A_log, dt_bias
            + self.linear_value_head_dim
            + values * hidden
        )
        attention = hidden * (2 * queries + 2 * keys) + 2 * self.head_dim + queries * hidden
        moe = (
            hidden * (experts + 1)
            + 3 * hidden * self.moe_intermediate_size * experts
            + 3 * hidden * self.shared_expert_intermediate_size
        )
        n_linear = self.layer_types.count(LINEAR_ATTENTION)
        n_full = len(self.layer_types) - n_linear
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        layers = n_linear * delta_net + n_full * attention
        return tables + hidden + layers + len(self.layer_types) * (moe + 2 * hidden)


def parse_config(obj: Mapping[str, Any], where: str = "config.json") -> Config:
    """Check a parsed config.json, nested (`text_config`) or flat.

    Args:
        obj: the file's top-level object.
        where: begins each error message.

    Raises:
        CheckpointError: naming the field, what was expected and what was found.
    """
    fields = _text_fields(obj, where)
    _refuse_variants(fields)
    numbers = {name: fields.integer(name, cap) for name, cap in _CAPS.items()}
    _check_divisibility(numbers, fields)
    layer_types = _layer_types(fields, numbers["num_hidden_layers"])
    rope_theta, rotary_dim = _rope(fields, numbers["head_dim"])
    tied = fields.flag("tie_word_embeddings", None)
    if tied is None:
        tied = bool(_Fields(obj, where).flag("tie_word_embeddings", False))
    return Config(
        **numbers,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1),
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        tie_word_embeddings=tied,
        norm_topk_prob=True,
        layer_types=layer_types,
    )


class _Fields:
    """Typed access to one object of the file; errors name the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, name: str, found: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}: {show(found)}, expected {expected}")

    def require(self, name: str, expected: str) -> Any:
        if name not in self.values:
            raise CheckpointError(f"{self.where}: {name}: missing, expected {expected}")
        return self.values[name]

    def integer(self, name: str, cap: int, default: int | None = None) -> int:
        expected = f"an integer in 1..{cap}"
        if default is not None and self.values.get(name) is None:
            return default
        value = self.require(name, expected)
        if not is_int(value) or not 1 <= value <= cap:
            raise self.error(name, value, expected)
        return int(value)

    def number(self, name: str, low: float, high: float) -> float:
        expected = f"a number in {low:g}..{high:g}"
        value = self.require(name, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, expected)
        # Written so that NaN fails; integers of any size compare exactly.
        if not low <= value <= high:
            raise self.error(name, value, expected)
        return float(value)

    def flag(self, name: str, default: bool | None) -> bool | None:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def section(self, name: str) -> _Fields:
        """A nested object; absent or null is an empty one."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return _Fields(value, f"{self.where}: {name}")


def _text_fields(obj: Mapping[str, Any], where: str) -> _Fields:
    """The object that holds the text model's fields, its `model_type` checked."""
    outer = _Fields(obj, where)
    nested = obj.get("text_config") is not None
    fields = outer.section("text_config") if nested else outer
    _check_model_type(outer, (_NESTED,) if nested else (_FLAT, _NESTED))
    if nested and fields.values.get("model_type") is not None:
        _check_model_type(fields, (_FLAT, _NESTED))
    return fields


def _check_model_type(fields: _Fields, accepted: tuple[str, ...]) -> None:
    expected = " or ".join(accepted)
    found = fields.require("model_type", expected)
    if found in accepted:
        return
    if isinstance(found, str) and found in _RELATIVES:
        raise CheckpointError(
            f"{fields.where}: model_type: {show(found)} ({_RELATIVES[found]}), expected {expected}"
        )
    raise fields.error("model_type", found, expected)


def _refuse_variants(fields: _Fields) -> None:
    """Refuse what would change the computation; absent and null mean the family's value."""
    for name, implemented in (
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("norm_topk_prob", True),
    ):
        found = fields.flag(name, implemented)
        if found is not implemented:
            raise fields.error(name, found, show(implemented))
    for name, word in (("hidden_act", "silu"), ("output_gate_type", "swish")):
        value = fields.values.get(name)
        if value is not None and value != word:
            raise fields.error(name, value, show(word))
    if fields.integer("decoder_sparse_step", 1 << 10, default=1) != 1:
        raise fields.error("decoder_sparse_step", fields.values["decoder_sparse_step"], "1")
    dense = fields.values.get("mlp_only_layers")
    if dense is not None and dense != []:
        raise fields.error("mlp_only_layers", dense, "no layers")


def _layer_types(fields: _Fields, n_layers: int) -> tuple[str, ...]:
    """The list if the file has one, else every `full_attention_interval`-th layer."""
    listed = fields.values.get("layer_types")
    if listed is None:
        interval = fields.integer("full_attention_interval", 1 << 10)
        return tuple(
            FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(n_layers)
        )
    if not isinstance(listed, list) or len(listed) != n_layers:
        raise fields.error("layer_types", listed, f"a list of {n_layers} values")
    for i, kind in enumerate(listed):
        if kind not in (LINEAR_ATTENTION, FULL_ATTENTION):
            raise fields.error(
                f"layer_types[{i}]", kind, f"{LINEAR_ATTENTION!r} or {FULL_ATTENTION!r}"
            )
    return tuple(listed)


def _rope(fields: _Fields, head_dim: int) -> tuple[float, int]:
    """(theta, rotated values per head), wherever the file's age puts them.

    New files have `rope_parameters`; older ones `rope_scaling` and top-level fields. A
    value given in several places must be the same in all.
    """
    places = [fields.section("rope_parameters"), fields.section("rope_scaling"), fields]
    for place in places[:2]:
        for key in ("rope_type", "type"):
            kind = place.values.get(key)
            if kind is not None and kind != "default":
                raise place.error(key, kind, "'default'")

    def agreed(name: str, low: float, high: float, default: float | None) -> float:
        found = [(p, p.number(name, low, high)) for p in places if p.values.get(name) is not None]
        if not found:
            if default is None:
                raise CheckpointError(f"{fields.where}: rope_parameters: {name}: missing")
            return default
        for place, value in found[1:]:
            if value != found[0][1]:
                raise place.error(name, value, f"{found[0][1]:g} as in {found[0][0].where}")
        return found[0][1]

    theta = agreed("rope_theta", 1.0, 1e12, None)
    factor = agreed("partial_rotary_factor", 1e-3, 1.0, 0.25)
    rotary_dim = math.floor(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            factor,
            f"an even share of {head_dim} values, found {rotary_dim}",
        )
    for place in places:
        _check_mrope(place, rotary_dim)
    return theta, rotary_dim


def _check_mrope(fields: _Fields, rotary_dim: int) -> None:
    """For text all three positions are equal: any split of the rotated pairs gives the same."""
    fields.flag("mrope_interleaved", None)
    sections = fields.values.get("mrope_section")
    if sections is None:
        return
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(is_int(s) and 0 <= s <= rotary_dim for s in sections)
        or sum(sections) != rotary_dim // 2
    ):
        raise fields.error("mrope_section", sections, f"three sizes of sum {rotary_dim // 2}")


def _check_divisibility(numbers: Mapping[str, int], fields: _Fields) -> None:
    def check(name: str, found: int, ok: bool, expected: str) -> None:
        if not ok:
            raise fields.error(name, found, expected)

    for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim"):
        size = numbers[name]
        check(name, size, size % 32 == 0, "a multiple of 32, at most 256")
    # The inputs of every matrix: groups of 64 share a scale.
    for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        size = numbers[name]
        check(name, size, size % 64 == 0, "a multiple of 64")
    for heads, width in (
        ("num_attention_heads", "head_dim"),
        ("linear_num_value_heads", "linear_value_head_dim"),
    ):
        values = numbers[heads] * numbers[width]
        check(f"{heads} · {width}", values, values % 64 == 0, "a multiple of 64")
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        n, divisor = numbers[many], numbers[few]
        check(many, n, n % divisor == 0, f"a multiple of {few} {divisor}")
    chosen, experts = numbers["num_experts_per_tok"], numbers["num_experts"]
    check("num_experts_per_tok", chosen, chosen <= experts, f"at most num_experts {experts}")
    taps = numbers["linear_conv_kernel_dim"]
    check("linear_conv_kernel_dim", taps, taps == 4, "4")
