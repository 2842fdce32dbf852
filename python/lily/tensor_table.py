"""The table of tensors: what the architecture demands, checked against what the files hold.

`expected_tensors` lists the text model's modules and tensors with their shapes; the rest
renames, decides how each linear module is stored, and compares.

Names are canonical: MLX's, without the prefix that the converter or the authors put in
front ("layers.3.mlp.gate.weight"). Published checkpoints differ in form, not only in
prefix: they keep the experts fused and the convolution's last two axes swapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lily.config import LINEAR_ATTENTION, Config
from lily.errors import CheckpointError
from lily.files import TensorEntry, is_int, show

Form = Literal["mlx", "published"]

_SUPPORTED: Final = "affine 4-bit or 8-bit in groups of 64, or bf16"
_MODE_DEFAULTS: Final[Mapping[str, tuple[int, int]]] = {  # mode: (group size, bits)
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "mxfp8": (32, 8),
    "nvfp4": (16, 4),
}


class Format(NamedTuple):
    """How a linear module's weights are stored: bits 4 or 8 in groups, or 16 (bf16, group 0)."""

    bits: int
    group_size: int


BF16: Final = Format(16, 0)


# What the architecture consists of ---------------------------------------------------------


class Expected(NamedTuple):
    """The text model's tensors, as a configuration demands them.

    Attributes:
        linears: module → shape [out, in], experts [E, out, in]; any may be quantised.
        others: tensor → (shape, accepted dtypes).
    """

    linears: dict[str, tuple[int, ...]]
    others: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


def expected_tensors(config: Config, form: Form) -> Expected:
    """Every module and tensor of the text model, in the model's order."""
    c = config
    hidden, experts = c.hidden_size, c.num_experts
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    n_values, channels = c.linear_num_value_heads, c.conv_channels
    values = n_values * c.linear_value_head_dim
    routed, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size
    taps = c.linear_conv_kernel_dim
    bf16, either = ("BF16",), ("BF16", "F32")

    linears: dict[str, tuple[int, ...]] = {"embed_tokens": (c.vocab_size, hidden)}
    others: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for i, kind in enumerate(c.layer_types):
        layer = f"layers.{i}."
        others[layer + "input_layernorm.weight"] = ((hidden,), bf16)
        if kind == LINEAR_ATTENTION:
            at = layer + "linear_attn."
            linears[at + "in_proj_qkv"] = (channels, hidden)
            linears[at + "in_proj_z"] = (values, hidden)
            linears[at + "in_proj_b"] = (n_values, hidden)
            linears[at + "in_proj_a"] = (n_values, hidden)
            conv = (channels, taps, 1) if form == "mlx" else (channels, 1, taps)
            others[at + "conv1d.weight"] = (conv, bf16)
            others[at + "A_log"] = ((n_values,), either)
            others[at + "dt_bias"] = ((n_values,), bf16)
            others[at + "norm.weight"] = ((c.linear_value_head_dim,), either)
            linears[at + "out_proj"] = (hidden, values)
        else:
            at = layer + "self_attn."
            linears[at + "q_proj"] = (2 * queries, hidden)  # each head: query, then gate
            linears[at + "k_proj"] = (keys, hidden)
            linears[at + "v_proj"] = (keys, hidden)
            others[at + "q_norm.weight"] = ((c.head_dim,), bf16)
            others[at + "k_norm.weight"] = ((c.head_dim,), bf16)
            linears[at + "o_proj"] = (hidden, queries)
        others[layer + "post_attention_layernorm.weight"] = ((hidden,), bf16)
        at = layer + "mlp."
        linears[at + "gate"] = (experts, hidden)
        if form == "mlx":
            linears[at + "switch_mlp.gate_proj"] = (experts, routed, hidden)
            linears[at + "switch_mlp.up_proj"] = (experts, routed, hidden)
            linears[at + "switch_mlp.down_proj"] = (experts, hidden, routed)
        else:
            linears[at + "experts.gate_up_proj"] = (experts, 2 * routed, hidden)
            linears[at + "experts.down_proj"] = (experts, hidden, routed)
        linears[at + "shared_expert.gate_proj"] = (shared, hidden)
        linears[at + "shared_expert.up_proj"] = (shared, hidden)
        linears[at + "shared_expert.down_proj"] = (hidden, shared)
        linears[at + "shared_expert_gate"] = (1, hidden)
    others["norm.weight"] = ((hidden,), bf16)
    if not c.tie_word_embeddings:
        linears["lm_head"] = (c.vocab_size, hidden)
    return Expected(linears, others)


def weight_name(module: str) -> str:
    """The tensor that holds a linear module's matrix."""
    return module if ".mlp.experts." in module else module + ".weight"


# Longest first: "model." alone begins two of the others.
_PREFIXES: Final = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# Vision and the draft head are not part of the text model and decide nothing about it.
_SKIPPED: Final = ("vision_tower.", "visual.", "mtp.")
# Buffers that old converters saved; recomputed from the configuration.
_HARMLESS: Final = ".rotary_emb.inv_freq"


def canonical_name(name: str) -> str | None:
    """A tensor or module name without its prefix; None for what a text engine skips."""
    for prefix in ("", *_PREFIXES):
        if name.startswith(prefix) and name[len(prefix) :].startswith(_SKIPPED):
            return None
    if name.endswith(_HARMLESS):
        return None
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


# Quantisation settings ---------------------------------------------------------------------


class _Setting(NamedTuple):
    mode: str
    bits: int
    group_size: int


class Quantization(NamedTuple):
    everywhere: _Setting | None  # None: the config has no quantisation section
    modules: dict[str, _Setting | bool]


def _setting(obj: Mapping[str, Any], where: str) -> _Setting:
    mode = obj.get("mode")
    if mode is None:
        mode = "affine"
    if not isinstance(mode, str) or mode not in _MODE_DEFAULTS:
        raise CheckpointError(f"{where}: mode: {show(mode)}, expected 'affine'")
    group_size, bits = _MODE_DEFAULTS[mode]
    numbers = {"group_size": group_size, "bits": bits}
    for key in numbers:
        value = obj.get(key)
        if value is not None:
            if not is_int(value) or not 1 <= value <= 65536:
                raise CheckpointError(f"{where}: {key}: {show(value)}, expected a small integer")
            numbers[key] = value
    return _Setting(mode, numbers["bits"], numbers["group_size"])


def parse_quantization(config: Mapping[str, Any], where: str) -> Quantization:
    """The settings, written once or several times, for canonical module names."""
    section: Mapping[str, Any] | None = None
    text = config.get("text_config")
    places: list[tuple[str, Mapping[str, Any]]] = [(where, config)]
    if isinstance(text, dict):
        places.append((f"{where}: text_config", text))
    for place, obj in places:
        for key in ("quantization", "quantization_config"):
            found = obj.get(key)
            if found is None:
                continue
            if not isinstance(found, dict):
                raise CheckpointError(f"{place}: {key}: {show(found)}, expected an object")
            if section is None:
                section, where = found, f"{place}: {key}"
            elif found != section:
                raise CheckpointError(f"{place}: {key}: differs from {where}")
    if section is None:
        return Quantization(None, {})
    method = section.get("quant_method")
    if method not in (None, "mlx", "affine"):
        raise CheckpointError(
            f"{where}: quant_method: {show(method)}, expected none (supported: {_SUPPORTED})"
        )
    modules: dict[str, _Setting | bool] = {}
    for key, value in section.items():
        name = canonical_name(key)
        if name is None or not isinstance(value, dict | bool):
            continue  # vision and draft head; the global numbers; keys that set nothing
        place = f"{where}: {show(key)[1:-1]}"
        setting = value if isinstance(value, bool) else _setting(value, place)
        if modules.setdefault(name, setting) != setting:
            raise CheckpointError(f"{place}: differs from an earlier entry for {show(name)[1:-1]}")
    return Quantization(_setting(section, where), modules)


def _format(module: str, settings: Quantization, has_scales: bool) -> Format:
    """How `module` is stored: its own entry, else the global one if it has scales."""
    setting = settings.modules.get(module)
    if setting is None and not has_scales:
        return BF16
    if setting is False:
        if has_scales:
            raise CheckpointError(
                f"{module}.scales: found, but config.json leaves this module in bf16, expected none"
            )
        return BF16
    chosen = setting if isinstance(setting, _Setting) else settings.everywhere
    if chosen is None:
        raise CheckpointError(
            f"{module}.scales: found, but config.json has no quantization, expected none"
        )
    if chosen.mode != "affine" or chosen.bits not in (4, 8) or chosen.group_size != 64:
        raise CheckpointError(
            f"{module}: quantised {chosen.mode} {chosen.bits}-bit in groups of"
            f" {chosen.group_size}, expected {_SUPPORTED}"
        )
    return Format(chosen.bits, chosen.group_size)


# The tensor table --------------------------------------------------------------------------


class TensorTable:
    """The files' tensors under canonical names, taken one by one as they are checked."""

    def __init__(self, files: Sequence[Path], headers: Sequence[dict[str, TensorEntry]]) -> None:
        self.files = files
        self.found: dict[str, TensorEntry] = {}
        self.taken: dict[str, TensorEntry] = {}
        for entry in (entry for header in headers for entry in header.values()):
            name = canonical_name(entry.name)
            if name is None:
                continue
            other = self.found.get(name)
            if other is not None:
                raise CheckpointError(
                    f"{self.place(entry)}: {show(name)[1:-1]}: appears twice,"
                    f" first in {self.place(other)}"
                )
            self.found[name] = replace(entry, name=name)

    def place(self, entry: TensorEntry) -> str:
        return self.files[entry.file].name

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        entry = self.found.get(name)
        if entry is None:
            raise CheckpointError(
                f"{name}: missing, expected {' or '.join(dtypes)} {show(shape)}"
                f" in {self.files[0].parent}"
            )
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{self.place(entry)}: {name}: dtype {entry.dtype}, expected {' or '.join(dtypes)}"
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{self.place(entry)}: {name}: shape {show(entry.shape)}, expected {show(shape)}"
            )
        self.taken[name] = entry

    def take_linear(self, module: str, shape: tuple[int, ...], stored: Format) -> None:
        if stored == BF16:
            self.take(weight_name(module), shape, ("BF16",))
            return
        words = (*shape[:-1], shape[-1] * stored.bits // 32)
        groups = (*shape[:-1], shape[-1] // stored.group_size)
        self._check_width(module, stored)
        self.take(module + ".weight", words, ("U32",))
        self.take(module + ".scales", groups, ("BF16",))
        self.take(module + ".biases", groups, ("BF16",))

    def _check_width(self, module: str, stored: Format) -> None:
        """Words and groups per row tell the width too; say so where the config disagrees."""
        weight, scales = self.found.get(module + ".weight"), self.found.get(module + ".scales")
        if weight is None or scales is None or weight.dtype != "U32":
            return
        if not weight.shape or not scales.shape or not scales.shape[-1]:
            return
        bits, rest = divmod(32 * weight.shape[-1], scales.shape[-1] * stored.group_size)
        if (bits, rest) != (stored.bits, 0):
            raise CheckpointError(
                f"{self.place(weight)}: {module}: config.json says {stored.bits} bits in groups of"
                f" {stored.group_size}, found {show(weight.shape)} words for"
                f" {show(scales.shape)} groups"
            )

    def refuse_rest(self) -> None:
        for name, entry in self.found.items():
            if name not in self.taken:
                raise CheckpointError(
                    f"{self.place(entry)}: {show(name)[1:-1]}: {entry.dtype} {show(entry.shape)},"
                    " expected no such tensor in this architecture"
                )


def _form(table: TensorTable, config: Config) -> Form:
    """Told by the convolution alone: a last axis other than 1 is the published form."""
    for i, kind in enumerate(config.layer_types):
        conv = table.found.get(f"layers.{i}.linear_attn.conv1d.weight")
        if kind == LINEAR_ATTENTION and conv is not None:
            return "mlx" if conv.shape[-1:] == (1,) else "published"
    fused = "layers.0.mlp.experts.gate_up_proj" in table.found
    return "published" if fused else "mlx"


def check_tensors(
    table: TensorTable, config: Config, settings: Quantization
) -> tuple[Form, dict[str, Format]]:
    form = _form(table, config)
    expected = expected_tensors(config, form)
    if config.tie_word_embeddings:  # a saved copy of the embedding; the embedding is used
        for part in ("weight", "scales", "biases"):
            table.found.pop(f"lm_head.{part}", None)
    formats = {}
    for module, shape in expected.linears.items():
        has_scales = module + ".scales" in table.found
        formats[module] = _format(module, settings, has_scales)
        if form == "published" and formats[module] != BF16:
            raise CheckpointError(
                f"{module}: quantised in a checkpoint of published form, expected bf16"
            )
        table.take_linear(module, shape, formats[module])
    for name, (shape, dtypes) in expected.others.items():
        table.take(name, shape, dtypes)
    table.refuse_rest()
    return form, formats
