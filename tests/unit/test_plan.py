"""The plan of the real configuration, from its dimensions alone: no weights, no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lily
import random_checkpoint
from lily import _core
from lily.config import parse_config
from lily.loading import core_config
from lily.tensor_table import expected_tensors

# What one token reads of a 4-bit checkpoint with 8-bit routers, of the routed experts only the
# chosen, and of the embedding one row.
REAL_BYTES = 1_669_562_496
STATE_BYTES = 30 * 32 * 128 * 128 * 4


def parts(preset: str) -> tuple[_core.Config, _core.TensorTable]:
    text = random_checkpoint.text_config(random_checkpoint.PRESETS[preset], tied=False)
    config = parse_config(text)
    table = _core.TensorTable()
    for module in expected_tensors(config, "mlx").linears:
        table.add_format(
            module, 8 if module.endswith(("mlp.gate", "shared_expert_gate")) else 4, 64
        )
    return core_config(config, 248_077), table


def stats(kind: str, ablate: Sequence[str] = (), **options: Any) -> dict[str, int]:
    config, table = parts("real")
    known = {"single_block": False, "penalties": False, **options}
    engine = _core.Options("fast", chunk=512, ablate=ablate)
    return _core.plan_stats(_core.Device("cpu", 1), config, table, engine, kind, **known)


@pytest.mark.parametrize(
    ("kind", "options", "dispatches"),
    [
        ("next_greedy", {}, 252),
        ("next_greedy", {"single_block": True}, 242),
        ("next_drawn", {}, 252),
        ("next_drawn", {"penalties": True}, 252),
        ("step", {}, 252),  # embeds instead of sampling
        ("pick", {}, 1),
    ],
)
def test_dispatches_of_a_decoded_token(
    kind: str, options: dict[str, bool], dispatches: int
) -> None:
    found = stats(kind, **options)
    assert found["dispatches"] == dispatches
    assert found["stages"] == dispatches  # a chain: each waits for the one before
    assert found["barriers"] == dispatches - 1


# A prompt's chunk: embed, 7 a delta net, 5 an attention, 7 the experts, head; a ring's refill runs
# beside the scan.
PROMPT = 1 + 30 * 7 + 10 * 5 + 40 * 7 + 1
# name: dispatches and stages of a decoded token, and of a prompt's last chunk
ABLATED = {
    "coalesced_kv": (252, 252, PROMPT, PROMPT - 30),
    "fused_qk_prep": (262, 262, PROMPT, PROMPT - 30),
    "gqa_packing": (252, 252, PROMPT, PROMPT - 30),
    "last_layer_skip": (252, 252, PROMPT, PROMPT - 30),  # a last chunk goes through it anyway
    "split_kv": (252, 252, PROMPT, PROMPT - 30),
    "token_handover": (253, 253, PROMPT, PROMPT - 30),  # embeds what the host hands over
    "concurrent_dispatch": (252, 252, PROMPT, PROMPT),
    "chunked_prompts": (252, 252, PROMPT, PROMPT - 30),
    # Ahead of each product, an expansion: 2 of a mixing layer, 4 of an expert layer.
    "dequantise_in_product": (252, 252, PROMPT + 40 * 6, PROMPT - 30),
    # The host chooses and groups instead of a dispatch each.
    "gpu_routing": (252, 252 + 40, PROMPT - 80, PROMPT - 30),
    "row_parallel": (252, 252, PROMPT, PROMPT - 30),
    "register_scan": (252, 252, PROMPT, PROMPT - 30),
    # Of each expert layer: the choice, gate beside up, and their product instead of one dispatch.
    "fused_gate_up": (252 + 40 * 3, 252 + 40 * 2, PROMPT, PROMPT - 30),
    "fused_down": (252 + 40, 252 + 40, PROMPT, PROMPT - 30),
    "fused_delta_norm": (252 + 30, 252 + 30, PROMPT, PROMPT - 30),
}


@pytest.mark.parametrize("name", ABLATED)
def test_what_a_plan_does_without(name: str) -> None:
    decoded, prompt = (stats(kind, ablate=[name]) for kind in ("next_greedy", "prompt"))
    assert (
        decoded["dispatches"], decoded["stages"], prompt["dispatches"], prompt["stages"]
    ) == ABLATED[name]  # fmt: skip


def test_the_last_layer_of_other_chunks_is_skipped() -> None:
    # Of attention and experts remain the norm, the projection of keys and values, their way into
    # the cache.
    without, found = stats("prefill", ["last_layer_skip"]), stats("prefill")
    assert without["dispatches"] == PROMPT - 1  # no head
    assert found["dispatches"] == without["dispatches"] - 2 - 7
    keys_and_values, experts = 2 * 512 / 9216 * 10.6e6, 458e6
    saved = without["weight_bytes"] - found["weight_bytes"]
    assert saved == pytest.approx(experts + 10.6e6 - keys_and_values + 4.7e6, rel=0.05)


def test_the_guide_counts_the_same() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "measuring.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \|$", guide, re.M)
    assert [name for name, *_ in rows] == list(lily.techniques())
    for name, *counts in rows:
        found = [stats(kind, ablate=[name])["dispatches"] for kind in ("next_greedy", "prompt")]
        assert found == [int(count) for count in counts], name


def test_bytes_of_a_decoded_token() -> None:
    found = stats("next_greedy")
    assert found["weight_bytes"] == pytest.approx(REAL_BYTES, rel=0.02)
    # The recurrent states once each way; beside them only vectors of a few thousand elements.
    assert STATE_BYTES <= found["read_bytes"] <= 1.2 * STATE_BYTES
    assert STATE_BYTES <= found["written_bytes"] <= 1.2 * STATE_BYTES


def test_prefill_exposes_concurrency() -> None:
    found = stats("prompt")
    assert found["stages"] < found["dispatches"]
    assert found["barriers"] == found["stages"] - 1


def test_memory_of_the_real_model() -> None:
    config, table = parts("real")
    need = _core.memory_need(
        _core.Device("cpu", 1),
        config,
        table,
        _core.Options("fast", chunk=512, memory_bytes=64 << 30),
    )
    assert need["weight_bytes"] == pytest.approx(19.51e9, rel=0.01)
    assert need["position_bytes"] == 20_480
    assert need["session_bytes"] == pytest.approx(2 * STATE_BYTES, rel=0.05)
    assert need["scratch_bytes"] < 200e6
    assert need["largest_context"] > 1_000_000
    options = _core.Options("fast", chunk=512, memory_bytes=64 << 30, kv_int8=True)
    need = _core.memory_need(_core.Device("cpu", 1), config, table, options)
    assert need["position_bytes"] == 10 * 2 * 2 * (256 + 4)
