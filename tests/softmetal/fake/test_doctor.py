"""`lily doctor` over the software Metal: what it says of a GPU that works, and of those that do
not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CONTRACTS, LONG, SOFTMETAL, metal_missing

import random_checkpoint
from lily import _core, _testing, doctor
from lily.cli import main

MISSING = next((reason for op in CONTRACTS if (reason := metal_missing(op))), None)
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(not SOFTMETAL, reason="only the software Metal fails when told to"),
]

SETTINGS = ("mode", "fail_library", "fail_pipeline", "wrong_types", "system", "chip")
TINY = random_checkpoint.text_config(random_checkpoint.PRESETS["tiny"], tied=False)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    for name in SETTINGS:
        _testing.fake_set(name, None)
    assert not _testing.fake_reports()


def stubbed(monkeypatch: pytest.MonkeyPatch, *precisions: str, **settings: str) -> doctor.Report:
    """An examination with kernels that compile at once and write zeros."""
    monkeypatch.setattr(doctor, "PRECISIONS", precisions or ("fast",))
    _testing.fake_set("mode", "stub")
    for name, value in settings.items():
        _testing.fake_set(name, value)
    return doctor.examine("metal", threads=2)


def wrong_facts(report: doctor.Report) -> list[str]:
    return [name for name, _, is_wrong in report.facts if is_wrong]


def test_all_is_well(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Kernels of the tiny checkpoint, which other tests compile as well.
    monkeypatch.setattr(doctor, "PRECISIONS", ("float32",))
    monkeypatch.setattr(doctor, "RELEASED", TINY)
    monkeypatch.setattr(doctor, "N_TOKENS", TINY["vocab_size"])
    _testing.fake_set("mode", "plain")
    told = tmp_path / "doctor.json"
    assert main(["doctor", str(checkpoint("tiny")), "--json", str(told)]) == 0
    page = capsys.readouterr().out
    assert page.endswith("\nok\n")
    assert " lily expects, 0 that could not be asked for" in page
    assert "GPU architecture" in page and "self-check          passed" in page
    report: dict[str, Any] = json.loads(told.read_text())
    assert {k["kernel"] for k in report["kernels"]} == set(CONTRACTS)
    assert {k["kernel"] for k in report["pipelines"]} == set(CONTRACTS)
    assert all(k["difference"] <= 1e-5 and k["max_threads"] >= 32 for k in report["kernels"])
    assert report["wrong"] == []


def test_wrong_numbers_of_one_kernel_do_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    report = stubbed(monkeypatch)
    assert wrong_facts(report) == ["self-check"]
    found = {k.kernel: k for k in report.kernels}
    assert set(found) == set(CONTRACTS)
    assert all(k.error for k in found.values())  # no kernel may write zeros and pass
    assert "differs by" in found["prefill_attend"].error
    assert not any(k.error for k in report.pipelines)
    # A line for each kernel, and the forms counted.
    assert report.page().count("wrong: head (") == 1
    assert sum(line.startswith("head (") for line in report.wrong) > 1


@pytest.mark.parametrize("which", ["fail_library", "fail_pipeline"])
def test_a_kernel_that_does_not_compile_is_named(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    # The self-check's kernels and the methods' own come first.
    report = stubbed(monkeypatch, **{which: "12"})
    (failed,) = [k for k in report.pipelines if k.error]
    assert f"metal: kernel {failed.kernel}: " in failed.error and "made to fail" in failed.error
    assert len(report.pipelines) > len(CONTRACTS)
    assert {k.kernel for k in report.kernels} == set(CONTRACTS)
    assert f"wrong: {failed.kernel} (" in report.page()


def test_a_method_with_other_types_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = stubbed(monkeypatch, wrong_types="setBuffer:offset:atIndex:")
    assert "-[MTLComputeCommandEncoder setBuffer:offset:atIndex:]" in wrong_facts(report)
    assert any("are not as lily expects" in value for _, value, _ in report.facts)


def test_an_older_system_lacks_nothing_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = stubbed(monkeypatch, system="14")
    assert wrong_facts(report) == ["self-check"]  # stubs
    assert ("residency sets", "no", False) in report.facts


def test_a_chip_with_tensor_operations(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]
) -> None:
    # Its kernels take long to compile here; tests/ops/test_metal_chips.py has those that differ.
    monkeypatch.setattr(doctor, "PRECISIONS", ("fast",) if LONG else ())
    monkeypatch.setattr(doctor, "RELEASED", TINY)
    monkeypatch.setattr(doctor, "N_TOKENS", TINY["vocab_size"])
    for name, value in (("mode", "plain"), ("chip", "5"), ("system", "26.2")):
        _testing.fake_set(name, value)
    report = doctor.examine("metal", checkpoint("tiny"), threads=2)
    assert report.wrong == []
    assert ("tensor operations", "used: the probe multiplies correctly", False) in report.facts


def test_a_probe_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = stubbed(monkeypatch, system="26.2", chip="5")
    (told,) = [value for name, value, _ in report.facts if name == "tensor operations"]
    assert told.startswith("not used: the probe fails: gives 0")
    assert "tensor operations" in wrong_facts(report)


def test_without_metal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_core, "has_metal", False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Metal               not in this build of lily" in out
    assert "CPU device          cpu" in out and out.endswith("\nok\n")
    assert main(["doctor", "--device", "metal"]) == 1
    assert "wrong: Metal: not in this build" in capsys.readouterr().out
