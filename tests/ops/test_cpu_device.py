"""Which instruction set the CPU device runs."""

from __future__ import annotations

import pytest
from harness import isas

import lily
from lily import _testing


def test_the_best_instruction_set_is_the_default() -> None:
    assert f" {isas()[-1]}" in _testing.description(1, "")


@pytest.mark.parametrize("isa", isas())
def test_an_instruction_set_can_be_asked_for(isa: str) -> None:
    assert f"cpu {isa}" in _testing.description(2, isa)
    assert _testing.description(2, isa).endswith("2 threads")


def test_the_environment_can_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_CPU_ISA", "portable")
    assert "cpu portable" in _testing.description(4, "")


def test_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lily.DeviceError, match="instruction set sse9, expected one .*portable"):
        _testing.description(1, "sse9")
    monkeypatch.setenv("LILY_CPU_ISA", "neon9")
    with pytest.raises(lily.DeviceError, match="neon9"):
        _testing.description(5, "")
