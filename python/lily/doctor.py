"""Does all of lily work on this machine? The work behind `lily doctor`.

Four questions, and nothing that fails stops the next one:

* What is here: the device, the system, what they say of themselves. The Metal device also asks the
  system for the types of each method that lily calls.
* Does the device start, with its self-check?
* Does every kernel compile for the dimensions of Qwen3.6-35B-A3B, in each precision?
* Does every kernel compute what the CPU device's does, given the same inputs?
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.affine import to_bf16
from lily.bench import commit_of_lily, machine, sysctl
from lily.checkpoint import open_checkpoint, resolve
from lily.config import FULL_ATTENTION, Config, parse_config
from lily.errors import Error
from lily.loading import Precision, core_config, core_table
from lily.tensor_table import expected_tensors
from lily.terminal import printable

PRECISIONS: Final[tuple[Precision, ...]] = ("fast", "float32")
N_TOKENS: Final = 248_077  # that the released model's tokenizer knows

RELEASED: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
"""The text model of Qwen3.6-35B-A3B, as in its config.json."""

SMALL: Final[Mapping[str, Any]] = {
    **RELEASED,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 16,
}
"""A model whose random weights are a few megabytes, with the released one's head sizes."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, compiled once. See `KernelReport` in src/runtime/check.h."""

    precision: str
    kernel: str
    plan: str
    stage: str
    error: str
    max_threads: int
    compile_s: float
    dispatches: int
    slot: str
    difference: float
    seconds: float


@dataclass
class Report:
    """What was found.

    Attributes:
        facts: name, value, and whether that is wrong.
        pipelines: kernels of the released dimensions, compiled.
        kernels: kernels of `model`, compared with the CPU device's.
        failures: what kept a part of the examination from being done.
    """

    facts: list[tuple[str, str, bool]] = field(default_factory=list)
    pipelines: list[Kernel] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    model: str = ""

    @property
    def wrong(self) -> list[str]:
        """What is wrong, each with its whole message."""
        return self._wrong(each_form=True)

    def _wrong(self, each_form: bool) -> list[str]:
        lines = [f"{name}: {value}" for name, value, is_wrong in self.facts if is_wrong]
        lines += self.failures
        for found in (self.pipelines, self.kernels):
            failed = [k for k in found if k.error]
            for i, k in enumerate(failed):
                same = [j for j, other in enumerate(failed) if other.kernel == k.kernel]
                if not each_form and i != same[0]:
                    continue
                more = f"; and {len(same) - 1} more" if len(same) > 1 and not each_form else ""
                lines.append(f"{k.kernel} ({k.precision}; {k.plan}; {k.stage}{more}): {k.error}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """A plain object for `json.dump`."""
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "facts": [
                {"name": name, "value": value, "wrong": is_wrong}
                for name, value, is_wrong in self.facts
            ],
            "pipelines": [vars(k) for k in self.pipelines],
            "model": self.model,
            "kernels": [vars(k) for k in self.kernels],
            "wrong": self.wrong,
        }

    def page(self) -> str:
        """All of it for reading; messages are cut, the JSON has them whole."""
        lines = [f"{name:<20}{value}" for name, value, _ in self.facts]
        if self.pipelines:
            good = [k for k in self.pipelines if not k.error]
            slowest = max(good, key=lambda k: k.compile_s, default=None)
            lines.append(
                f"{'pipelines':<20}{len(good)} of {len(self.pipelines)} compile for the dimensions"
                " of Qwen3.6-35B-A3B"
                + (f"; slowest {slowest.kernel}, {slowest.compile_s:.2f} s" if slowest else "")
            )
        if self.kernels:
            lines += ["", f"kernels of {self.model} beside the CPU device's:", *self._table()]
        lines.append("")
        for message in self._wrong(each_form=False):
            first, *more = message.splitlines()
            lines.append(f"wrong: {first}")
            lines += [f"    {line}" for line in more[:4]]
        if not self.wrong:
            lines.append("ok")
        return "\n".join(printable(line) for line in lines)

    def _table(self) -> Iterable[str]:
        """A line for each kernel: the worst of its forms."""
        heads = f"{'kernel':<24}{'compile':>9}{'threads':>9}"
        yield heads + f"{'fast':>10}{'float32':>10}{'shortest':>11}"
        for name in dict.fromkeys(k.kernel for k in self.kernels):
            forms = [k for k in self.kernels if k.kernel == name]
            worst = {
                p: max((k.difference for k in forms if k.precision == p), default=0.0)
                for p in ("fast", "float32")
            }
            yield (
                f"{name:<24}{1000 * max(k.compile_s for k in forms):>6.0f} ms"
                f"{min(k.max_threads for k in forms) or '–':>9}"
                f"{worst['fast']:>10.1e}{worst['float32']:>10.1e}"
                f"{1e6 * min(k.seconds for k in forms):>8.0f} µs"
                f"  {'wrong' if any(k.error for k in forms) else 'ok'}"
            )


def examine(
    device: str = "auto",
    model: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    status: Callable[[str], None] = lambda _: None,
) -> Report:
    """Look at this machine and at a device of it.

    Args:
        device: "auto" takes Metal where lily has it, "metal" says what is missing where not.
        model: a checkpoint whose first layers are run; None makes a small random one.
        threads: of the CPU device; None is one for each physical core.
        revision, offline, progress: of a checkpoint from the hub, as in `Model.load`.
        status: told what is being done.

    Raises:
        CheckpointError: `model` cannot be read.
    """
    report = Report(_about_this_process())
    cpu = _core.Device("cpu", threads or 0)
    report.facts.append(("CPU device", cpu.description, False))
    status("starting the device")
    checked = _open_metal(report, device)
    if checked is None:
        return report
    report.facts += checked.findings()
    if sys.platform == "darwin":
        limit = sysctl("iogpu.wired_limit_mb")
        shown = f"{limit} MB" if limit.strip("0") else "the system's own"
        report.facts.append(("wired memory limit", shown, False))
    for precision in PRECISIONS:
        status(f"compiling kernels: {precision}")
        with _noted(report, f"compiling kernels, {precision}"):
            config = parse_config(RELEASED)
            found = _core.compile_kernels(
                checked, core_config(config, N_TOKENS), _formats(config), _core.Options(precision)
            )
            report.pipelines += [Kernel(precision, **k) for k in found]
    with tempfile.TemporaryDirectory(prefix="lily-doctor-") as folder:
        if model is None:
            config, table = random_model(Path(folder) / "weights")
            report.model = "a small random model"
        else:
            at, _ = resolve(model, revision, offline, progress)
            checkpoint = open_checkpoint(at)
            config, table = checkpoint.config, core_table(checkpoint)
            report.model = f"{os.fspath(model)}, its first layers"
        core = core_config(config, config.vocab_size)
        kinds = config.layer_types
        core.full_attention = core.full_attention[: kinds.index(FULL_ATTENTION) + 1]
        for precision in PRECISIONS:
            status(f"comparing kernels: {precision}")
            with _noted(report, f"comparing kernels, {precision}"):
                options = _core.Options(precision, io_threads=2)
                compared = _core.compare_kernels(checked, cpu, core, table, options)
                report.kernels += [Kernel(precision, **k) for k in compared]
    return report


class _noted:
    """An error inside becomes a line of the report."""

    def __init__(self, report: Report, what: str) -> None:
        self._report, self._what = report, what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Error):
            return False
        self._report.failures.append(f"{self._what}: {error}")
        return True


def _about_this_process() -> list[tuple[str, str, bool]]:
    from lily import __version__

    commit = commit_of_lily()
    about = machine()
    return [
        ("lily", __version__ + (f" ({commit})" if commit else ""), False),
        ("Python", f"{platform.python_version()}, {platform.machine()}", False),
        ("system", f"{about['os']}, {about['memory_bytes'] / 1e9:.0f} GB", False),
        ("CPU", f"{about['cpu']}, {about['physical_cores']} cores", False),
    ]


def _open_metal(report: Report, device: str) -> _core.Device | None:
    """The Metal device, even if its self-check fails; None if there is none to examine."""
    if device == "cpu":
        return None
    if not _core.has_metal:
        report.facts.append(("Metal", "not in this build of lily", device == "metal"))
        return None
    try:
        found = _core.Device("metal", 0)
    except Error as error:
        report.facts.append(("self-check", str(error), True))
    else:
        report.facts.append(("self-check", "passed", False))
        return found
    with _noted(report, "opening the device"):
        return _core.Device("metal", 0, checked=False)
    return None


# Weights


def _bits(module: str) -> int:
    """As mlx-community's 4-bit checkpoints have it."""
    return 8 if module.endswith(("mlp.gate", "shared_expert_gate")) else 4


def _formats(config: Config) -> _core.TensorTable:
    """A table that says how each matrix is stored, and not where."""
    table = _core.TensorTable()
    for module in expected_tensors(config, "mlx").linears:
        table.add_format(module, _bits(module), 64)
    return table


def random_model(path: Path) -> tuple[Config, _core.TensorTable]:
    """Write random weights for a small model.

    Args:
        path: of the one file that holds them.
    """
    config = parse_config(SMALL)
    table = _formats(config)
    table.files = [str(path)]
    random = np.random.default_rng(0)
    linears, others = expected_tensors(config, "mlx")
    with path.open("wb") as file:

        def add(name: str, dtype: str, values: NDArray[Any]) -> None:
            data = values.tobytes()
            table.add_tensor(name, 0, file.tell(), len(data), dtype, list(values.shape))
            file.write(data)

        for module, (*lead, width) in linears.items():
            bits = _bits(module)
            codes = random.integers(0, 1 << 32, (*lead, width * bits // 32), np.uint32)
            # Uniform codes of 4 bits have a deviation of 4.6.
            scale = 1 / (4.6 * (1 << (bits - 4)) * width**0.5)
            scales = (scale * random.uniform(0.5, 1.5, (*lead, width // 64))).astype(np.float32)
            add(f"{module}.weight", "U32", codes)
            add(f"{module}.scales", "BF16", to_bf16(scales))
            add(f"{module}.biases", "BF16", to_bf16(-scales * ((1 << bits) - 1) / 2))
        for name, (shape, dtypes) in others.items():
            around = 1.0 if name.endswith("norm.weight") else 0.0
            values = (around + 0.3 * random.standard_normal(shape)).astype(np.float32)
            add(name, dtypes[0], to_bf16(values) if dtypes[0] == "BF16" else values)
    return config, table
