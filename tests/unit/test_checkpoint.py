"""The loader's Python half: headers, index, settings, names, hub.

The tensor table is checked against checkpoints that examples/random_checkpoint.py writes, which
knows nothing of lily, and against published counts of the released model.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

import random_checkpoint
import sparse_checkpoint as sparse
from lily.checkpoint import Checkpoint, open_checkpoint, resolve
from lily.config import parse_config
from lily.errors import CheckpointError
from lily.files import DTYPE_BYTES, parse_json, read_header, read_json
from lily.tensor_table import BF16, Format, canonical_name, expected_tensors, weight_name
from sparse_checkpoint import Blob, build, pack, pack_header, write

Q4, Q8 = Format(4, 64), Format(8, 64)
MODEL = "model.safetensors"
ROOT = "language_model.model."


def load(folder: Path, files: dict[str, Blob]) -> Checkpoint:
    return open_checkpoint(write(folder, files))


def refused(folder: Path, files: dict[str, Blob], *words: str) -> None:
    write(folder, files)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert not message.endswith(".")
    for word in words:
        assert word in message, message


def with_settings(**changes: Any) -> dict[str, Blob]:
    """A 4-bit checkpoint whose quantisation settings are changed; None deletes one."""
    files = build()
    raw = json.loads(files["config.json"].head)
    settings = raw["quantization"] | changes
    raw["quantization"] = {k: v for k, v in settings.items() if v is not None}
    del raw["quantization_config"]
    files["config.json"] = sparse.text_blob(raw)
    return files


def with_tensors(
    changes: dict[str, tuple[str, tuple[int, ...]] | None], **options: Any
) -> dict[str, Blob]:
    """A checkpoint with tensors added, replaced or (None) removed."""
    raw = sparse.config()
    form = options.get("form", "mlx")
    held = sparse.tensors(raw, form, form == "mlx")
    merged = {**held, **changes}
    return build(raw, held={k: v for k, v in merged.items() if v is not None}, **options)


# --- Whole checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mlx", "published"])
@pytest.mark.parametrize("preset", ["tiny", "heads"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shard_bytes", [None, 300_000])
def test_written_elsewhere(
    tmp_path: Path, form: Any, preset: str, nested: bool, shard_bytes: int | None
) -> None:
    random_checkpoint.write(
        tmp_path, preset, form=form, nested=nested, shard_bytes=shard_bytes, tied=not nested
    )
    found = open_checkpoint(tmp_path)
    assert found.form == form
    assert (len(found.files) > 1) == (shard_bytes is not None)
    assert found.config.tie_word_embeddings is not nested
    assert set(found.formats.values()) == ({Q4, Q8} if form == "mlx" else {BF16})
    assert found.tokenizer == tmp_path / "tokenizer.json"
    assert found.chat_template == tmp_path / "chat_template.jinja"
    assert found.generation_config["top_k"] == 20
    ids = [random_checkpoint.TEXT.token_id(t) for t in ("<|endoftext|>", "<|im_end|>")]
    assert found.stop_ids == tuple(sorted(ids))
    for entry in found.tensors.values():
        assert entry.offset + entry.nbytes <= found.files[entry.file].stat().st_size


def test_released_model_counts(tmp_path: Path) -> None:
    """1757 tensors and 19,508,789,376 bytes, as counted publicly for the 4-bit files."""
    raw = sparse.config(
        **random_checkpoint.text_config(
            random_checkpoint.Dims(
                hidden=2048, layers=40, vocab=248320, q_heads=16, kv_heads=2, head_dim=256,
                lin_k_heads=16, lin_v_heads=32, lin_k_dim=128, lin_v_dim=128,
                experts=256, top_k=8, expert_width=512, shared_width=512,
            ),
            False,
        )
    )  # fmt: skip
    # Sizes only: not every file system stores 19.5 GB of zeros for nothing.
    found = sparse.tensors(raw, extras=False)
    assert len(found) == 1757
    n_bytes = sum(DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in found.values())
    # The helper stores the 30 delta norms of 128 values in float32, the released files in bf16.
    assert n_bytes - 30 * 128 * 2 == 19_508_789_376
    config = parse_config(raw)
    linears, others = expected_tensors(config, "published")
    shapes = [*linears.values(), *(shape for shape, _ in others.values())]
    assert sum(map(math.prod, shapes)) == config.n_parameters


@pytest.mark.parametrize("form", ["mlx", "published"])
def test_extras_change_nothing(tmp_path: Path, form: Any) -> None:
    raw = sparse.config()
    bare = build(raw, form, held=sparse.tensors(raw, form, form == "mlx", extras=False))
    extra = sparse.tensors(raw, form, form == "mlx", extras=True)
    # A draft head holds a convolution and norms of its own; they must not decide the form.
    for name in ("mtp.layers.0.linear_attn.conv1d.weight", "language_model.mtp.norm.weight"):
        extra[name] = ("BF16", (128, 1, 4) if form == "mlx" else (128, 4, 1))
    found = load(tmp_path / "extra", build(raw, form, held=extra))
    plain = load(tmp_path / "bare", bare)
    assert found.form == plain.form == form
    assert list(found.tensors) == list(plain.tensors)
    assert found.formats == plain.formats
    assert found.weights_bytes == plain.weights_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 1},
        {"linear_num_value_heads": 8, "linear_num_key_heads": 1},
        {"linear_num_value_heads": 6, "linear_num_key_heads": 2},
        {"linear_num_value_heads": 2, "linear_num_key_heads": 2},
        {"tie_word_embeddings": True},
        {"linear_key_head_dim": 64, "linear_value_head_dim": 128, "head_dim": 64,
         "rope_parameters": {"rope_theta": 1e7}},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["mlx", "published"])
def test_every_shape_of_the_family(tmp_path: Path, changes: dict[str, Any], form: Any) -> None:
    raw = sparse.config(**changes)
    assert load(tmp_path / "nested", build(raw, form)).form == form
    flat = load(tmp_path / "flat", build(sparse.flat(raw), form))
    assert ("lm_head" in flat.formats) is not flat.config.tie_word_embeddings


def test_unquantised_mlx_form(tmp_path: Path) -> None:
    found = load(tmp_path, build(quantised=False))
    assert found.form == "mlx"
    assert set(found.formats.values()) == {BF16}


def test_tied_head_ignores_a_saved_copy(tmp_path: Path) -> None:
    raw = sparse.config(tie_word_embeddings=True)
    held = sparse.tensors(sparse.config())
    assert any("lm_head" in name for name in held)
    assert "lm_head.weight" not in load(tmp_path, build(raw, held=held)).tensors


def test_path_with_spaces_and_letters(tmp_path: Path) -> None:
    folder = tmp_path / "mein größtes Modell 模型"
    assert load(folder, build()).files == (folder / MODEL,)
    assert resolve(str(folder)) == (folder, None)


def test_canonical_names() -> None:
    for prefix in ("language_model.model.", "model.language_model.", "model.", ""):
        assert canonical_name(prefix + "layers.3.mlp.gate.weight") == "layers.3.mlp.gate.weight"
        assert canonical_name(prefix + "layers.0.self_attn.rotary_emb.inv_freq") is None
        assert canonical_name(prefix + "mtp.norm.weight") is None
    assert canonical_name("language_model.lm_head.weight") == "lm_head.weight"
    assert canonical_name("lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.a", "model.visual.a", "visual.a", "model.vision_tower.a"):
        assert canonical_name(name) is None
    assert weight_name("layers.0.mlp.experts.down_proj") == "layers.0.mlp.experts.down_proj"
    assert weight_name("layers.0.mlp.gate") == "layers.0.mlp.gate.weight"


# --- Tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {ROOT + "layers.0.mlp.gate.weight": ("U32", (5, 16))},
            ("model.safetensors", "layers.0.mlp.gate.weight", "[5, 16]", "[4, 16]"),
        ),
        ({ROOT + "norm.weight": ("F16", (64,))}, ("norm.weight", "F16", "BF16")),
        ({ROOT + "norm.weight": ("BF16", (1, 64))}, ("norm.weight", "[1, 64]", "[64]")),
        ({ROOT + "norm.weight": None}, ("norm.weight", "missing", "[64]")),
        ({ROOT + "layers.1.self_attn.q_proj.biases": None}, ("q_proj.biases", "missing")),
        ({ROOT + "layers.1.self_attn.q_proj.weight": None}, ("q_proj.weight", "missing")),
        (
            {ROOT + "layers.1.self_attn.q_proj.scales": ("F32", (256, 1))},
            ("q_proj.scales", "F32", "BF16"),
        ),
        (
            {ROOT + "layers.1.self_attn.q_proj.bias": ("BF16", (256,))},
            ("q_proj.bias", "expected no such tensor"),
        ),
        ({ROOT + "layers.2.input_layernorm.weight": ("BF16", (64,))}, ("layers.2",)),
        ({"something.else": ("BF16", (64,))}, ("something.else", "no such tensor")),
        ({"model." + "norm.weight": ("BF16", (64,))}, ("norm.weight", "twice")),
        (
            {ROOT + "layers.0.linear_attn.conv1d.weight": ("BF16", (128, 3, 1))},
            ("conv1d.weight", "[128, 3, 1]", "[128, 4, 1]"),
        ),
        (
            {ROOT + "layers.0.linear_attn.A_log": ("F16", (2,))},
            ("A_log", "F16", "BF16 or F32"),
        ),
    ],
)
def test_wrong_tensors(
    tmp_path: Path,
    changes: dict[str, tuple[str, tuple[int, ...]] | None],
    words: tuple[str, ...],
) -> None:
    refused(tmp_path, with_tensors(changes), *words)


def test_either_float_where_files_differ(tmp_path: Path) -> None:
    at = ROOT + "layers.0.linear_attn."
    changes: dict[str, tuple[str, tuple[int, ...]] | None] = {
        at + "A_log": ("BF16", (2,)),
        at + "norm.weight": ("BF16", (32,)),
    }
    assert load(tmp_path, with_tensors(changes)).tensors["layers.0.linear_attn.A_log"].nbytes == 4


def test_harmless_buffers_are_ignored(tmp_path: Path) -> None:
    name = ROOT + "layers.1.self_attn.rotary_emb.inv_freq"
    assert load(tmp_path, with_tensors({name: ("F32", (4,))})).form == "mlx"


def test_forms_do_not_mix(tmp_path: Path) -> None:
    conv = ROOT + "layers.0.linear_attn.conv1d.weight"
    refused(tmp_path / "a", with_tensors({conv: ("BF16", (128, 1, 4))}), "published form", "bf16")
    at = "model.language_model.layers.0."
    changes: dict[str, tuple[str, tuple[int, ...]] | None] = {
        at + "linear_attn.conv1d.weight": ("BF16", (128, 4, 1))
    }
    refused(tmp_path / "b", with_tensors(changes, form="published"), "switch_mlp", "missing")


# --- Quantisation settings ----------------------------------------------------------------------


def test_settings_are_honoured_in_either_naming(tmp_path: Path) -> None:
    for i, prefix in enumerate(("language_model.model.", "model.language_model.", "model.", "")):
        gate = {"bits": 8}  # group and mode: the mode's defaults
        moved = {f"{ROOT}layers.{n}.mlp.gate": None for n in range(2)}
        files = with_settings(**moved | {f"{prefix}layers.{n}.mlp.gate": gate for n in range(2)})
        found = load(tmp_path / str(i), files)
        assert found.formats["layers.0.mlp.gate"] == Q8
        assert found.formats["layers.0.mlp.shared_expert_gate"] == Q8
        assert found.formats["layers.0.mlp.switch_mlp.up_proj"] == Q4
        assert found.formats["lm_head"] == Q4


@pytest.mark.parametrize(
    "entry", [True, {}, {"bits": 4}, {"group_size": 64, "mode": "affine"}, {"bits": None}]
)
def test_entries_that_mean_the_default(tmp_path: Path, entry: object) -> None:
    files = with_settings(**{ROOT + "embed_tokens": entry, "language_model.lm_head": entry})
    found = load(tmp_path, files)
    assert found.formats["embed_tokens"] == found.formats["lm_head"] == Q4


def test_modules_left_in_bf16(tmp_path: Path) -> None:
    """`false`, or no entry and no scales."""
    module = ROOT + "layers.1.self_attn.k_proj"
    changes: dict[str, tuple[str, tuple[int, ...]] | None] = {
        module + ".weight": ("BF16", (64, 64)),
        module + ".scales": None,
        module + ".biases": None,
    }
    files = with_tensors(changes)
    assert load(tmp_path / "none", files).formats["layers.1.self_attn.k_proj"] == BF16
    files["config.json"] = with_settings(**{module: False})["config.json"]
    assert load(tmp_path / "false", files).formats["layers.1.self_attn.k_proj"] == BF16
    files["config.json"] = with_settings(**{module: True})["config.json"]
    refused(tmp_path / "true", files, "k_proj", "BF16", "U32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 6}, ("embed_tokens", "affine 6-bit in groups of 64", "4-bit or 8-bit")),
        ({"group_size": 32}, ("embed_tokens", "groups of 32")),
        ({"mode": "mxfp4", "bits": None, "group_size": None}, ("mxfp4", "groups of 32")),
        ({"mode": "nvfp4"}, ("nvfp4",)),
        ({"mode": "secret"}, ("mode", "secret", "affine")),
        ({"bits": "4"}, ("bits", "'4'")),
        ({"bits": True}, ("bits", "true")),
        ({"bits": 0}, ("bits", "0")),
        ({"quant_method": "gptq"}, ("quant_method", "gptq")),
        ({ROOT + "embed_tokens": False}, ("embed_tokens.scales", "bf16")),
        ({ROOT + "embed_tokens": {"bits": 3}}, ("embed_tokens", "3-bit")),
        ({ROOT + "layers.0.mlp.gate": {"bits": 4}}, ("layers.0.mlp.gate", "4 bits", "[4, 16]")),
        ({ROOT + "layers.0.mlp.gate": None}, ("layers.0.mlp.gate", "4 bits")),
        ({ROOT + "layers.0.mlp.gate": {"mode": 4}}, ("layers.0.mlp.gate", "mode", "4")),
        ({"layers.0.mlp.gate": {"bits": 4}}, ("layers.0.mlp.gate", "differs")),
    ],
)
def test_settings_refused(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(tmp_path, with_settings(**changes), *words)


def test_settings_of_skipped_parts_are_ignored(tmp_path: Path) -> None:
    files = with_settings(
        **{
            "vision_tower.blocks.0": {"bits": 3},
            "mtp.fc": {"mode": "unheard"},
            "some_flag": True,
            "some_text": "x",
        }
    )
    assert load(tmp_path, files).formats["embed_tokens"] == Q4


def test_scales_without_settings(tmp_path: Path) -> None:
    files = build()
    files["config.json"] = sparse.text_blob(sparse.config())
    refused(tmp_path, files, "embed_tokens.scales", "no quantization")


def test_two_sections_must_agree(tmp_path: Path) -> None:
    files = build()
    raw = json.loads(files["config.json"].head)
    raw["quantization_config"] = {"bits": 8}
    files["config.json"] = sparse.text_blob(raw)
    refused(tmp_path, files, "quantization_config", "differs")


# --- Index and files ----------------------------------------------------------------------------


def test_sharded_with_index(tmp_path: Path) -> None:
    found = load(tmp_path, build(shards=3))
    assert [path.name[:11] for path in found.files] == ["model-00001", "model-00002", "model-00003"]
    assert {entry.file for entry in found.tensors.values()} == {0, 1, 2}


def test_shards_without_index(tmp_path: Path) -> None:
    files = build(shards=3)
    del files[sparse.INDEX]
    files["adapter.safetensors"] = pack({"lora.a": ("BF16", (1,))})
    files["._model.safetensors"] = sparse.text_blob(b"left by another system")
    assert len(load(tmp_path / "all", files).files) == 3
    del files["model-00002-of-00003.safetensors"]
    refused(tmp_path / "two", files, "model-00002-of-00003.safetensors", "missing")


def test_index_decides_over_other_files(tmp_path: Path) -> None:
    files = build(shards=2)
    files[MODEL] = pack({"stale": ("BF16", (1,))})
    assert len(load(tmp_path / "stale", files).files) == 2
    files = build()
    held = json.loads(files[MODEL].head[8:])
    index = {name: MODEL for name in held if name != "__metadata__"}
    files[sparse.INDEX] = sparse.text_blob({"weight_map": index})
    assert load(tmp_path / "single", files).files == (tmp_path / "single" / MODEL,)


def test_index_against_files(tmp_path: Path) -> None:
    files = build(shards=2)
    second = "model-00002-of-00002.safetensors"
    refused(tmp_path / "a", {k: v for k, v in files.items() if k != second}, second, "missing")
    index = json.loads(files[sparse.INDEX].head)
    index["weight_map"]["extra.weight"] = second
    files[sparse.INDEX] = sparse.text_blob(index)
    refused(tmp_path / "b", files, second, "extra.weight", "missing")
    refused(tmp_path / "c", build() | {sparse.INDEX: sparse.text_blob({})}, "weight_map")
    no_weights = {k: v for k, v in build().items() if k != MODEL}
    refused(tmp_path / "d", no_weights, "no .safetensors")
    no_config = {k: v for k, v in build().items() if k != "config.json"}
    refused(tmp_path / "e", no_config, "config.json", "not found")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    raw = sparse.config()
    files = build(raw)
    files["model-2.safetensors"] = pack({ROOT + "norm.weight": ("BF16", (64,))})
    refused(tmp_path, files, "norm.weight", "twice", "model-2.safetensors", MODEL)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", "x.bin", "", ".safetensors",
     "\0.safetensors", "a\\x.safetensors", "*.safetensors", "x" * 300 + ".safetensors",
     "é" * 200 + ".safetensors", 1, None, [],
     "\ud800.safetensors", "\u202ex.safetensors"],
)  # fmt: skip
def test_path_tricks(tmp_path: Path, name: object) -> None:
    files = build(shards=2)
    index = json.loads(files[sparse.INDEX].head)
    index["weight_map"][next(iter(index["weight_map"]))] = name
    files[sparse.INDEX] = sparse.text_blob(index)
    refused(tmp_path, files, "expected the name of a .safetensors file")


def test_links_are_followed_pipes_are_not(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", build())
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    assert open_checkpoint(folder).form == "mlx"
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be opened"):
        open_checkpoint(folder)


# --- Headers ------------------------------------------------------------------------------------

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | changes}


def two(begin: int, end: int) -> dict[str, Any]:
    return GOOD | {"b": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (Blob(b"", 0), ("0 bytes",)),
        (Blob(b"\x01", 7), ("7 bytes",)),
        (Blob(b"\xff" * 8, 8), ("header of 18446744073709551615 bytes",)),
        (Blob((100_000_001).to_bytes(8, "little"), 200_000_000), ("header of 100000001",)),
        (Blob((9).to_bytes(8, "little"), 16), ("header of 9 bytes", "at most 8")),
        (pack_header(b"", 0), ("does not begin",)),
        (pack_header(b" {}", 0), ("does not begin",)),
        (pack_header(b"{", 0), ("not JSON",)),
        (pack_header(b"{}\xff", 0), ("UTF-8",)),
        (pack_header(b"{" * 100_000, 0), ("not JSON",)),
        (pack_header(b'{"a":' * 100_000, 0), ("nested",)),
        (pack_header(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", 0), ("nested",)),
        (pack_header(b'{"a":1,"a":2}', 0), ("twice",)),
        (pack_header(b'{"a":NaN}', 0), ("NaN",)),
        (pack_header(b'{"a":1e999}', 0), ("1e999",)),
        (pack_header(b'{"a":' + b"1" * 5000 + b"}", 0), ("digits",)),
        (pack_header({"a": []}, 0), ("a: [], expected an object",)),
        (pack_header({"": GOOD["a"]}, 8), ("name",)),
        (pack_header({"x" * 600: GOOD["a"]}, 8), ("name of 600",)),
        (pack_header({"a": {"dtype": "F32", "shape": [2]}}, 8), ("data_offsets is missing",)),
        (pack_header(entry(dtype="F4"), 8), ("dtype 'F4'",)),
        (pack_header(entry(dtype=["F32"]), 8), ("dtype ['F32']",)),
        (pack_header(entry(shape=2), 8), ("shape 2",)),
        (pack_header(entry(shape=[True, 2]), 8), ("shape [true, 2]",)),
        (pack_header(entry(shape=[-2]), 8), ("shape [-2]",)),
        (pack_header(entry(shape=[2.0]), 8), ("shape [2.0]",)),
        (pack_header(entry(shape=[1] * 9), 8), ("a list of 9",)),
        (pack_header(entry(shape=[2**62, 4]), 8), ("2^48",)),
        (pack_header(entry(shape=[2**32, 2**32]), 8), ("8 bytes", "73786976294838206464")),
        (pack_header(entry(shape=[3]), 8), ("8 bytes", "12", "F32 [3]")),
        (pack_header(entry(data_offsets=[0, 8, 16]), 8), ("two integers",)),
        (pack_header(entry(data_offsets=[0.0, 8]), 8), ("two integers",)),
        (pack_header(entry(data_offsets=[8, 0]), 8), ("bytes 8 to 0",)),
        (pack_header(entry(data_offsets=[-8, 0]), 8), ("bytes -8 to 0",)),
        (pack_header(GOOD, 7), ("bytes 0 to 8", "within 7 bytes")),
        (pack_header(GOOD, 9), ("expected", "by its header")),
        (pack_header(two(4, 12), 12), ("b: its bytes overlap those of a",)),
        (pack_header(two(0, 8), 8), ("overlap",)),
        (pack_header(two(9, 12), 12), ("1 bytes between it and a",)),
        (pack_header({"__metadata__": [], **GOOD}, 8), ("__metadata__",)),
        (pack_header({"__metadata__": {"a": 1}, **GOOD}, 8), ("__metadata__",)),
    ],
)
def test_bad_headers(tmp_path: Path, blob: Blob, words: tuple[str, ...]) -> None:
    write(tmp_path, {"x.safetensors": blob})
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "x.safetensors")
    message = str(caught.value)
    assert "x.safetensors" in message
    for word in words:
        assert word in message, message


def test_good_header(tmp_path: Path) -> None:
    """Any alignment, padded text, empty tensors, any order."""
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
        "none": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [8, 8]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [11, 19], "more": 1},
        **GOOD,
    }
    write(tmp_path, {"x": pack_header(json.dumps(header).encode() + b"  ", 19)})
    found = read_header(tmp_path / "x", 5)
    start = (tmp_path / "x").stat().st_size - 19
    assert list(found) == ["b", "none", "scalar", "a"]
    assert found["b"] == (type(found["b"])("b", 5, start + 8, 3, "U8", (3,)))
    assert found["scalar"].shape == ()


def test_truncated_data(tmp_path: Path) -> None:
    files = build()
    files[MODEL] = replace(files[MODEL], size=files[MODEL].size - 1)
    refused(tmp_path, files, MODEL, "expected a range within")


def test_json_limits(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="values"):
        parse_json(b"[" + b"1," * 5_000_000 + b"1]", "x")
    with pytest.raises(CheckpointError, match="lists and objects"):
        parse_json(b"[" * 2_000_000, "x")
    write(tmp_path, {"big.json": Blob(b"{}", 100_000_001), "list.json": sparse.text_blob([1])})
    with pytest.raises(CheckpointError, match="at most"):
        read_json(tmp_path / "big.json")
    with pytest.raises(CheckpointError, match="expected an object"):
        read_json(tmp_path / "list.json")


# --- Text side ----------------------------------------------------------------------------------


def test_stop_ids_come_from_everywhere(tmp_path: Path) -> None:
    raw = {**sparse.config(eos_token_id=[3, 4]), "eos_token_id": 5}
    files = build(raw)
    assert load(tmp_path / "all", files).stop_ids == (3, 4, 5, sparse.END, sparse.TURN)
    del files["generation_config.json"]
    found = load(tmp_path / "some", files)
    assert found.stop_ids == (3, 4, 5, sparse.TURN)
    assert found.generation_config == {}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        del files[name]
    found = load(tmp_path / "few", files)
    assert found.stop_ids == (3, 4, 5)
    assert found.tokenizer is None
    assert found.chat_template is None


def test_chat_template_in_the_tokenizer_config(tmp_path: Path) -> None:
    files = build()
    del files["chat_template.jinja"]
    files["tokenizer_config.json"] = sparse.text_blob(
        {"chat_template": "x", "eos_token": {"content": "<|im_end|>"}}
    )
    found = load(tmp_path, files)
    assert found.chat_template == tmp_path / "tokenizer_config.json"
    assert sparse.TURN in found.stop_ids


@pytest.mark.parametrize(
    ("file", "value", "words"),
    [
        ("config.json", sparse.config(eos_token_id=128), ("eos_token_id", "128", "0..127")),
        ("config.json", sparse.config(eos_token_id=[True]), ("eos_token_id", "true")),
        ("config.json", sparse.config(eos_token_id=[0] * 300), ("eos_token_id", "300")),
        ("generation_config.json", {"eos_token_id": "2"}, ("eos_token_id", "'2'")),
        ("generation_config.json", [], ("generation_config.json", "an object")),
        ("tokenizer_config.json", {"eos_token": 7}, ("eos_token", "7")),
        ("tokenizer_config.json", {"eos_token": "<none>"}, ("eos_token", "<none>")),
        ("tokenizer.json", {"added_tokens": [{"content": "<|im_end|>", "id": -1}]}, ("-1",)),
        ("tokenizer.json", {"added_tokens": [{"content": "<|im_end|>"}]}, ("null",)),
        ("tokenizer.json", {"added_tokens": {"<|im_end|>": 1}}, ("<|im_end|>",)),
        ("tokenizer.json", b"{", ("tokenizer.json", "not JSON")),
    ],
)
def test_bad_text_files(tmp_path: Path, file: str, value: Any, words: tuple[str, ...]) -> None:
    files = build(quantised=False)
    refused(tmp_path, files | {file: sparse.text_blob(value)}, *words)


# --- Hub ----------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/some-model"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> NoReturn:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Blob]], Path]:
    """Puts files into a cache folder as huggingface_hub lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def put(files: dict[str, Blob]) -> Path:
        repo = cache / "models--org--some-model"
        snapshot = repo / "snapshots" / COMMIT
        blobs = write(repo / "blobs", files)
        snapshot.mkdir(parents=True)
        for name in files:
            (snapshot / name).symlink_to(os.path.relpath(blobs / name, snapshot))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
        return snapshot

    return put


Put = Callable[[dict[str, Blob]], Path]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_cached_opens_no_connection(hub: Put, shards: int, indexed: bool) -> None:
    files = build(shards=shards)
    if not indexed:
        files.pop(sparse.INDEX, None)
    snapshot = hub(files)
    for revision in (None, "main", COMMIT):
        folder, commit = resolve(REPO, revision=revision)
        assert (folder, commit) == (snapshot, COMMIT)
    assert open_checkpoint(folder).form == "mlx"


@pytest.mark.usefixtures("no_network")
def test_offline_and_not_cached(hub: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="org/some-model: it is not cached"):
        resolve(REPO, offline=True)
    snapshot = hub(build(shards=3))
    with pytest.raises(CheckpointError, match="org/some-model at v2: it is not cached"):
        resolve(REPO, revision="v2", offline=True)
    # The link stays when a cache is cleaned by hand.
    (snapshot / "model-00002-of-00003.safetensors").resolve().unlink()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(CheckpointError, match=r": model-00002-of-00003\.safetensors is"):
                resolve(REPO)


@pytest.mark.usefixtures("no_network")
def test_damaged_cached_index_is_reported(hub: Put) -> None:
    hub(build(shards=2) | {sparse.INDEX: sparse.text_blob(b"{")})
    with pytest.raises(CheckpointError, match="not JSON"):
        resolve(REPO)


@pytest.mark.usefixtures("no_network")
def test_offline_without_tokenizer(hub: Put) -> None:
    files = build()
    del files["tokenizer.json"]
    snapshot = hub(files)
    assert resolve(REPO, offline=True) == (snapshot, COMMIT)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "source",
    ["nothing", "x" * 5000, "a/b/c", "", "/does/not/exist", "a/..", "../a", "a//b", "org/na\0me",
     "org/na me", "x" * 99 + "/y", "org/", "a--b/c", Path("org/name")],
)  # fmt: skip
def test_no_such_source(source: Any) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(source)


@pytest.mark.usefixtures("no_network")
def test_bad_revisions(tmp_path: Path) -> None:
    for revision in ("", "../main", "/etc", "a b", "x" * 300, "main\n"):
        with pytest.raises(ValueError, match="revision"):
            resolve(REPO, revision=revision)
    with pytest.raises(ValueError, match="local folder"):
        resolve(tmp_path, revision="main")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="expected the folder"):
        resolve(tmp_path / "file")


class FakeHub:
    """Stands in for snapshot_download: copies files of a 'remote' into the cache."""

    def __init__(self, remote: dict[str, Blob], cache: Path) -> None:
        self.remote = remote
        self.snapshot = cache / "models--org--some-model" / "snapshots" / COMMIT
        self.asked: list[str] = []
        self.revisions: list[str | None] = []

    def __call__(
        self, repo: str, *, revision: str | None, allow_patterns: list[str],
        ignore_patterns: list[str], tqdm_class: Any,
    ) -> str:  # fmt: skip
        import fnmatch

        self.revisions.append(revision)
        bar = tqdm_class(total=0, unit="B", unit_scale=True, desc="bytes", initial=0)
        files = tqdm_class(total=3, desc="files")
        for name in self.remote:
            if any(fnmatch.fnmatch(name, p) for p in allow_patterns) and not any(
                fnmatch.fnmatch(name, p) for p in ignore_patterns
            ):
                self.asked.append(name)
                bar.total += self.remote[name].size
                write(self.snapshot, {name: self.remote[name]})
                bar.update(self.remote[name].size)
                files.update(1)
        refs = self.snapshot.parents[1] / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(COMMIT)
        return str(self.snapshot)


@pytest.fixture
def fake(hub: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    remote = build(shards=2) | {
        "README.md": sparse.text_blob(b"x"),
        "extra.safetensors": sparse.text_blob(b"x"),
        "sub/model.safetensors": sparse.text_blob(b"x"),
        "model.gguf": sparse.text_blob(b"x"),
    }
    found = FakeHub(remote, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", found)
    return found


@pytest.mark.usefixtures("no_network")
def test_download_takes_what_is_needed_once(
    fake: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int, int]] = []
    folder, commit = resolve(REPO, progress=lambda *call: calls.append(call))
    assert commit == COMMIT
    assert sorted(fake.asked) == sorted(build(shards=2))
    assert fake.revisions == [None, COMMIT]  # the second step stays at the first one's commit
    assert open_checkpoint(folder).form == "mlx"
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert done[-1] == sum(fake.remote[name].size for name in fake.asked)
    assert calls[-1][0] == "download"
    assert calls[-1][1] == calls[-1][2]
    assert capfd.readouterr() == ("", "")
    resolve(REPO)
    assert len(fake.revisions) == 2


@pytest.mark.usefixtures("no_network")
def test_unsupported_is_refused_before_weights(fake: FakeHub) -> None:
    fake.remote["config.json"] = sparse.text_blob({"model_type": "qwen4_exp"})
    with pytest.raises(CheckpointError, match="qwen4_exp"):
        resolve(REPO)
    assert not any(name.endswith(".safetensors") for name in fake.asked)


@pytest.mark.usefixtures("no_network")
def test_hostile_index_is_not_followed(fake: FakeHub) -> None:
    fake.remote[sparse.INDEX] = sparse.text_blob({"weight_map": {"a": "*.safetensors"}})
    with pytest.raises(CheckpointError, match="expected the name of"):
        resolve(REPO)
    assert not any(name.endswith(".safetensors") for name in fake.asked)


@pytest.mark.usefixtures("no_network")
def test_download_that_stays_incomplete(fake: FakeHub) -> None:
    del fake.remote["model-00002-of-00002.safetensors"]
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        resolve(REPO)


@pytest.mark.usefixtures("no_network")
def test_failing_callback_comes_through(fake: FakeHub) -> None:
    def progress(*_: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        resolve(REPO, progress=progress)


def response(status: int) -> Any:
    class Response:
        headers: dict[str, str] = {}  # noqa: RUF012
        status_code = status
        request = None
        text = ""

    return Response()


@pytest.mark.usefixtures("no_network", "hub")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GatedRepoError", "access must be granted"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HfHubHTTPError", "download failed: HfHubHTTPError"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")

    def fail(*_: Any, **__: Any) -> NoReturn:
        kind = getattr(errors, name)
        if name == "LocalEntryNotFoundError":
            raise kind("try again\nlater")
        raise kind("a long story\nin two lines", response=response(404))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve(REPO, revision="v1")
    assert str(caught.value).startswith("org/some-model at v1: ")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_real_client_without_a_network(hub: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed hub library, its connections refused: one typed error."""

    def connect(*_: Any) -> NoReturn:
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    with pytest.raises(CheckpointError, match="org/some-model: "):
        resolve(REPO)
