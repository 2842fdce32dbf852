"""config.json: every spelling that the family uses is read, everything else is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparse_checkpoint as sparse
from lily.config import FULL_ATTENTION, LINEAR_ATTENTION, parse_config
from lily.errors import CheckpointError

# The released 35B-A3B model.
RELEASED = sparse.config(
    hidden_size=2048,
    num_hidden_layers=40,
    vocab_size=248320,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=262144,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
)


def refused(raw: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(raw, "here/config.json")
    message = str(caught.value)
    assert message.startswith("here/config.json: ")
    assert not message.endswith(".")
    for word in words:
        assert word in message, message


def test_released_model() -> None:
    config = parse_config(RELEASED)
    assert config.layer_types.count(LINEAR_ATTENTION) == 30
    assert [i for i, t in enumerate(config.layer_types) if t == FULL_ATTENTION][:2] == [3, 7]
    assert config.rotary_dim == 64
    assert config.rope_theta == 1e7
    assert config.conv_channels == 8192
    assert config.norm_topk_prob
    assert not config.tie_word_embeddings
    assert round(config.n_parameters / 1e9, 2) == 34.66


def test_flat_equals_nested() -> None:
    raw = sparse.config()
    assert parse_config(sparse.flat(raw)) == parse_config(raw)
    assert parse_config({**sparse.flat(raw), "model_type": "qwen3_5_moe"}) == parse_config(raw)
    del raw["text_config"]["model_type"]
    assert parse_config(raw).hidden_size == 64


def test_layer_types_win_over_interval() -> None:
    kinds = [FULL_ATTENTION, LINEAR_ATTENTION]
    assert parse_config(sparse.config(layer_types=kinds)).layer_types == tuple(kinds)
    assert parse_config(sparse.config()).layer_types == (LINEAR_ATTENTION, FULL_ATTENTION)
    assert parse_config(sparse.config(layer_types=None)).layer_types[0] == LINEAR_ATTENTION


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_theta": 1e7}, "partial_rotary_factor": 0.25},
        {"rope_parameters": None, "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000000},
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
            "rope_theta": 1e7,
        },
    ],
)
def test_rope_variants(changes: dict[str, Any]) -> None:
    assert parse_config(sparse.config(**changes)) == parse_config(sparse.config())


def test_tied_head_may_be_said_outside() -> None:
    raw = sparse.config()
    assert parse_config({**raw, "tie_word_embeddings": True}).tie_word_embeddings is False
    del raw["text_config"]["tie_word_embeddings"]
    assert parse_config({**raw, "tie_word_embeddings": True}).tie_word_embeddings is True
    assert parse_config(raw).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("qwen3_5", "dense"),
        ("qwen3_5_text", "dense"),
        ("qwen3_next", "layout"),
        ("qwen4_exp", "architecture"),
        ("llama", "'llama'"),
        ("", "''"),
        (7, "7"),
        (None, "null"),
        ([], "[]"),
        ({}, "an object"),
    ],
)
def test_other_models_are_refused_by_name(model_type: object, word: str) -> None:
    refused({**sparse.flat(sparse.config()), "model_type": model_type}, "model_type", word)
    refused({**sparse.config(), "model_type": model_type}, "model_type", word)
    if model_type is not None:
        refused(sparse.config(model_type=model_type), "text_config", "model_type", word)


def test_missing_model_type() -> None:
    refused({}, "model_type", "missing", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, ("attention_bias", "true", "expected false")),
        ({"attn_output_gate": False}, ("attn_output_gate", "false", "expected true")),
        ({"attn_output_gate": 1}, ("attn_output_gate", "1")),
        ({"output_gate_type": "sigmoid"}, ("output_gate_type", "sigmoid", "swish")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"hidden_act": ["silu"]}, ("hidden_act",)),
        ({"norm_topk_prob": False}, ("norm_topk_prob", "false", "true")),
        ({"mlp_only_layers": [0]}, ("mlp_only_layers", "[0]")),
        ({"decoder_sparse_step": 2}, ("decoder_sparse_step", "2")),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, ("rope_type", "yarn")),
        ({"rope_parameters": {"type": "linear", "rope_theta": 1e7}}, ("type", "linear")),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ("rope_scaling", "dynamic")),
        ({"rope_parameters": {}}, ("rope_theta", "missing")),
        ({"rope_parameters": [1]}, ("rope_parameters", "[1]", "an object")),
        ({"rope_theta": 5.0}, ("rope_theta", "5", "1e+07")),
        ({"rope_parameters": {"rope_theta": True}}, ("rope_theta", "true")),
        ({"rope_parameters": {"rope_theta": float("nan")}}, ("rope_theta", "nan")),
        ({"rope_parameters": {"rope_theta": 0}}, ("rope_theta", "0")),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.1}},
            ("partial_rotary_factor", "even"),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}},
            ("partial_rotary_factor", "1.5"),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [1, 1, 1]}},
            ("mrope_section", "[1, 1, 1]", "sum 4"),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [6, -1, -1]}},
            ("mrope_section",),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_interleaved": "yes"}},
            ("mrope_interleaved", "yes"),
        ),
        ({"layer_types": ["full_attention"]}, ("layer_types", "2 values")),
        ({"layer_types": ["full_attention", "mamba"]}, ("layer_types[1]", "mamba")),
        ({"layer_types": "full_attention"}, ("layer_types",)),
        ({"full_attention_interval": 0}, ("full_attention_interval", "0")),
        ({"full_attention_interval": None}, ("full_attention_interval", "null")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps", "0")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "no")),
        # Divisibility
        ({"hidden_size": 96}, ("hidden_size", "96", "multiple of 64")),
        ({"moe_intermediate_size": 100}, ("moe_intermediate_size", "100")),
        ({"shared_expert_intermediate_size": 32}, ("shared_expert_intermediate_size", "32")),
        ({"head_dim": 48}, ("head_dim", "48", "multiple of 32")),
        ({"head_dim": 288}, ("head_dim", "288", "256")),
        ({"linear_key_head_dim": 16}, ("linear_key_head_dim", "16")),
        ({"linear_value_head_dim": 512}, ("linear_value_head_dim", "512")),
        ({"num_attention_heads": 3}, ("num_attention_heads · head_dim", "96", "multiple of 64")),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "4", "3")),
        ({"linear_num_key_heads": 4}, ("linear_num_value_heads", "2", "4")),
        ({"num_experts_per_tok": 5}, ("num_experts_per_tok", "5", "4")),
        ({"linear_conv_kernel_dim": 3}, ("linear_conv_kernel_dim", "3", "4")),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(sparse.config(**changes), *words)


INTEGERS = [
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    "value", [0, -1, True, 64.0, "64", None, [], {}, 2**31, 2**63, 2**64, 10**4000, float("nan")]
)
def test_absurd_numbers(name: str, value: object) -> None:
    refused(sparse.config(**{name: value}), name)


@pytest.mark.parametrize("name", INTEGERS)
def test_missing_numbers(name: str) -> None:
    raw = copy.deepcopy(sparse.config())
    del raw["text_config"][name]
    refused(raw, name, "missing")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


# The first texts are slow: hypothesis builds its table of Unicode.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(
    st.dictionaries(
        st.sampled_from([*sparse.config()["text_config"], "rope_scaling", "layer_types"]),
        VALUES,
        max_size=4,
    )
)
def test_any_values(changes: dict[str, Any]) -> None:
    message = ""
    try:
        parse_config(sparse.config(**changes))
    except CheckpointError as error:
        message = str(error)
    assert len(message) < 1000


@relaxed
@given(st.dictionaries(st.text(max_size=12) | st.just("text_config"), VALUES, max_size=6))
def test_any_object(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        parse_config(raw)
