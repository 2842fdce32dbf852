"""Arrows never turn back: which folder of src/ may include which."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAY_INCLUDE = {
    "base": {"base"},
    "device": {"base", "metal", "device"},
    "device/cpu": {"base", "metal", "device", "device/cpu"},
    "device/metal": {"base", "metal", "device", "device/metal"},
    "graph": {"base", "metal", "device", "graph"},
    "ops": {"base", "metal", "device", "graph", "ops"},
    "checkpoint": {"base", "metal", "device", "graph", "checkpoint"},
    "model": {"base", "graph", "ops", "checkpoint", "model"},
    "runtime": {"base", "device", "graph", "ops", "checkpoint", "model", "runtime"},
    "bindings": {"base", "metal", "device", "device/cpu", "graph", "ops", "runtime", "model"},
}
EXCEPTIONS = {
    # The one place that names concrete devices.
    "src/device/registry.cpp": {"device/cpu", "device/metal"},
    # Test builds only; fake.h is the software Metal's.
    "src/bindings/testing.cpp": {"device/metal", "."},
}


def _includes(path: Path) -> list[str]:
    return re.findall(r'#include "([^"]+)"', path.read_text())


def _folder(include: str) -> str:
    return str(Path(include).parent)


def test_includes_follow_the_layers():
    wrong = []
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in {".h", ".cpp"}:
            continue
        name = str(path.relative_to(ROOT))
        allowed = MAY_INCLUDE[_folder(name.removeprefix("src/"))] | EXCEPTIONS.get(name, set())
        wrong += [
            f"{name} includes {include}"
            for include in _includes(path)
            if _folder(include) not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_contracts_include_nothing_but_the_contract_reader():
    for path in (ROOT / "metal").glob("*.h"):
        if re.search(r"^LILY_CONTRACT\(", path.read_text(), re.M):
            assert _includes(path) == ["contract.h"], path.name


def test_no_file_grows_out_of_its_room():
    long = {
        str(p.relative_to(ROOT)): n
        for folder in ("src", "python", "metal")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in {".h", ".cpp", ".py"} and (n := len(p.read_text().splitlines())) > 600
    }
    assert not long
