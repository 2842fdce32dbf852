#!/usr/bin/env python3
"""Build lily's wheel for macOS on Linux, and look at what it would ask of a Mac.

    python3 tests/cross/macos.py

Compiles and links the extension for arm64, macOS 14 and the stable ABI, the way pip would there:
every source is type-checked by clang, and a name that no library is known to have fails the link.
Then every import of the result is looked up again: what lily takes of Metal and the Objective-C
runtime is exactly what objc.h lists, what it takes of Python is in the stable ABI of 3.12. Nobody
loads the wheel; it is thrown away.

Needs clang-22, lld-22 and llvm-22 (LILY_CROSS_LLVM names their folder) and a CPython of 3.12 or
later with its headers (LILY_CROSS_PYTHON names one). Downloads: registry.py, and from PyPI what
builds a wheel. Works in build/cross.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "cross"
sys.path.insert(0, str(ROOT / "tests"))

from cross import macho, objc_header, registry, sdk  # noqa: E402
from cross.registry import WORK, Missing  # noqa: E402

TAG = "cp312-abi3-macosx_14_0_arm64"
PACKAGES = "clang-22 lld-22 llvm-22"
BUILD_PACKAGES = ["scikit-build-core>=0.11", "nanobind>=3.1,<3.2", "cmake>=3.26", "ninja"]
SDK = WORK / "sdk"


def llvm() -> Path:
    folder = Path(os.environ.get("LILY_CROSS_LLVM", "/usr/lib/llvm-22/bin"))
    tools = ("clang++", "ld64.lld", "llvm-ar", "llvm-ranlib", "llvm-install-name-tool")
    if missing := [tool for tool in tools if not (folder / tool).exists()]:
        raise Missing(f"{folder} has no {', '.join(missing)} (apt-get install {PACKAGES})")
    return folder


def python() -> Path:
    """An interpreter whose headers know the stable ABI of 3.12."""
    names = [os.environ.get("LILY_CROSS_PYTHON"), sys.executable]
    names += [f"python3.{minor}" for minor in range(12, 16)]
    names += sorted(str(p) for p in Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python3"))
    question = (
        "import sys, sysconfig, pathlib, venv, ensurepip;"
        "h = pathlib.Path(sysconfig.get_path('include'), 'Python.h');"
        "sys.exit(not (sys.version_info >= (3, 12) and h.exists()))"
    )
    for name in names:
        path = shutil.which(name) if name else None
        if path and not subprocess.run([path, "-c", question], capture_output=True).returncode:
            return Path(path)
    raise Missing("no CPython of 3.12 or later with its headers (LILY_CROSS_PYTHON names one)")


def build_environment(interpreter: Path) -> Path:
    """A virtual environment with what builds a wheel; returns its programs' folder."""
    venv = WORK / "venv"
    programs = venv / "bin"
    noted = venv / "made-for"
    made_for = "\n".join([str(interpreter), *BUILD_PACKAGES])
    if not noted.exists() or noted.read_text() != made_for:
        subprocess.run([interpreter, "-m", "venv", "--clear", venv], check=True)
        command = [str(programs / "python"), "-m", "pip", "install", "--quiet", *BUILD_PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"cannot install {BUILD_PACKAGES}: {done.stderr.splitlines()[-1:]}")
        noted.write_text(made_for)
    return programs


def make_sdk(ziglang: Path) -> None:
    """The SDK in build/cross, made anew if anything of it has changed."""
    digest = hashlib.sha256(ziglang.name.encode())
    for path in [HERE / "sdk.py", HERE / "registry.py", *sorted(sdk.STUBS.iterdir())]:
        digest.update(path.read_bytes())
    noted = SDK / "made-of"
    if not noted.exists() or noted.read_text() != digest.hexdigest():
        sdk.make(ziglang, linked_on_a_mac(), SDK)
        noted.write_text(digest.hexdigest())


def link(tools: Path, source: str) -> bool:
    """Does a program of one function link?"""
    command = [
        tools / "clang++", "--target=arm64-apple-macos14.0", "-isysroot", SDK, "-stdlib=libc++",
        "-fuse-ld=lld", "-bundle", "-x", "c++", "-", "-o", WORK / "probe",
        "-framework", "Foundation", "-framework", "Metal", "-lobjc",
    ]  # fmt: skip
    done = subprocess.run([str(c) for c in command], input=source, text=True, capture_output=True)
    return not done.returncode


def link_is_strict(tools: Path) -> list[str]:
    """A link that accepts everything would say nothing."""
    program = 'extern "C" void* {0}(); void* probe() {{ return {0}(); }}'
    wrong = []
    if not link(tools, program.format("MTLCreateSystemDefaultDevice")):
        wrong.append("a program that calls Metal does not link")
    misspelt = ("MTLCreateSystemDefaultDevise", "objc_msgSent", "pthread_creat")
    return wrong + [
        f"a call of {name} links" for name in misspelt if link(tools, program.format(name))
    ]


def build(tools: Path, programs: Path) -> Path:
    """The wheel. If it does not compile or link, the process ends with the compiler's messages."""
    out = WORK / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    definitions = {
        "CMAKE_TOOLCHAIN_FILE": HERE / "toolchain.cmake",
        "LILY_STRICT": "ON",
    }
    options = [part for d in definitions.items() for part in ("-C", f"cmake.define.{d[0]}={d[1]}")]
    command = [
        programs / "python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--verbose",
        "-w", out, "-C", f"build-dir={WORK / 'macos'}", "-C", "install.strip=false", *options, ROOT,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64",
        "ARCHFLAGS": "-arch arm64",
        "LILY_CROSS_LLVM": str(tools),
        "LILY_CROSS_SDK": str(SDK),
    }
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
    for variable in ("CXX", "CC", "CXXFLAGS", "CFLAGS", "LDFLAGS"):
        environment.pop(variable, None)
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        sys.exit("wrong: the wheel does not build")
    (wheel,) = out.glob("*.whl")
    return wheel


@functools.cache
def linked_on_a_mac() -> dict[str, str]:
    """Which library real binaries take a symbol from."""
    found: dict[str, str] = {}
    for package in (registry.MLX_METAL, registry.PYOBJC):
        with zipfile.ZipFile(registry.wheel(package)) as archive:
            for name in archive.namelist():
                if name.endswith((".dylib", ".so")) and ".dSYM/" not in name:
                    binary = macho.read(archive.read(name))
                    # What needs a newer system than lily does may import what an older one lacks.
                    if tuple(map(int, binary.minimum.split("."))) <= (14, 0):
                        found |= binary.imports
    return found


@functools.cache
def stable_abi() -> set[str]:
    """The names that an extension for Python 3.12 and later may import."""
    with zipfile.ZipFile(registry.wheel(registry.ABI3INFO)) as archive:
        text = archive.read("abi3info/_internal.py").decode()
    entry = r'symbol=Symbol\(name="(\w+)", [^()]*\),\s*added=PyVersion\(major=3, minor=(\d+)\)'
    return {name for name, minor in re.findall(entry, text) if int(minor) <= 12}


@functools.cache
def stubs() -> dict[str, sdk.Stub]:
    """The libraries of the SDK, by the name that a program loads them by."""
    read = [sdk.read(path) for path in SDK.rglob("*.tbd")]
    return {stub.library: stub for stub in read}


def differences(binary: macho.Binary) -> list[str]:
    """What is wrong with the extension's imports, one line each."""
    wrong = []
    if (binary.kind, binary.minimum, binary.signed) != ("bundle", "14.0", True):
        wrong.append(f"a {binary.kind} for macOS {binary.minimum}, signed: {binary.signed}")
    known = stubs()
    wrong += [f"it loads {name}" for name in binary.libraries if name not in known]
    python_names, real = stable_abi(), linked_on_a_mac()
    for symbol, library in binary.imports.items():
        name = symbol.removeprefix("_")
        if library == macho.ANYWHERE:
            if name not in python_names:
                wrong.append(f"{name} is not in the stable ABI of Python 3.12")
        elif library not in known or symbol not in known[library].symbols:
            wrong.append(f"{library} is not known to have {name}")
        elif real.get(symbol, library) != library:
            wrong.append(f"{name} is in {real[symbol]}, not in {library}")
        elif symbol not in real and not known[library].trusted(symbol):
            wrong.append(f"{name}: no binary linked on a Mac imports it from {library}")
    # The Metal device's whole way to the system. A framework whose classes are asked for by name
    # has to be loaded as well, and nothing of the link would fail without it.
    header = ROOT / "src/device/metal/objc.h"
    if header.exists():
        needed = {name for name in known if "/Frameworks/" in name or "libobjc" in name}
        wrong += [f"it does not load {name}" for name in sorted(needed - set(binary.libraries))]
        listed = objc_header.read(header.read_text()).functions
        apple = {
            symbol.removeprefix("_")
            for symbol, library in binary.imports.items()
            if "libobjc" in library or "/Frameworks/" in library
        }
        wrong += [f"{name} is imported and not in objc.h" for name in sorted(apple - set(listed))]
        wrong += [f"{name} is in objc.h and not imported" for name in sorted(set(listed) - apple)]
    return wrong


def damaged(binary: macho.Binary) -> list[tuple[str, macho.Binary]]:
    """The extension with one thing more that is wrong, once for each kind that must be noticed."""
    system, objc, cxx = (f"/usr/lib/lib{name}.dylib" for name in ("System.B", "objc.A", "c++.1"))
    without_foundation = [name for name in binary.libraries if "Foundation" not in name]
    imports = {
        "_PyUnicode_AsUTF8": macho.ANYWHERE,  # in the stable ABI since 3.13
        "_PyDict_GetItemRef": macho.ANYWHERE,  # likewise
        "_lily_missing": macho.ANYWHERE,
        "_getrandom": system,  # of Linux
        "_malloc": cxx,
        "_objc_lookUpClass": objc,  # is there, but objc.h does not have it
    }
    return [
        *(
            (f"import {symbol}", replace(binary, imports={**binary.imports, symbol: library}))
            for symbol, library in imports.items()
        ),
        ("no Foundation", replace(binary, libraries=without_foundation)),
        ("another library", replace(binary, libraries=[*binary.libraries, "/usr/lib/libz.dylib"])),
        ("macOS 15", replace(binary, minimum="15.0")),
    ]


def report(wheel: Path, size: int, binary: macho.Binary) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; extension {size:,} bytes")
    for library in [*binary.libraries, macho.ANYWHERE]:
        symbols = sorted(s for s, where in binary.imports.items() if where == library)
        some = f": {' '.join(symbols)}" if 0 < len(symbols) < 8 else ""
        print(f"  {len(symbols):4} imports from {library or 'the process, for Python'}{some}")


def main() -> int:
    start = time.monotonic()
    try:
        tools, interpreter = llvm(), python()
        for package in (registry.MLX_METAL, registry.PYOBJC, registry.ABI3INFO):
            registry.wheel(package)
        make_sdk(registry.wheel(registry.ZIGLANG))
        programs = build_environment(interpreter)
    except Missing as reason:
        registry.skip(reason)
    wrong = link_is_strict(tools)
    wheel = build(tools, programs)
    if not wheel.name.endswith(f"-{TAG}.whl"):
        wrong.append(f"{wheel.name} is not for {TAG}")
    with zipfile.ZipFile(wheel) as archive:
        extensions = [name for name in archive.namelist() if name.endswith((".so", ".dylib"))]
        if extensions != ["lily/_core.abi3.so"]:
            wrong.append(f"the wheel's libraries are {extensions}")
        data = archive.read("lily/_core.abi3.so")
    binary = macho.read(data)
    found = differences(binary)
    # A check that notices nothing would look the same.
    unnoticed = [name for name, one in damaged(binary) if differences(one) == found]
    wrong += found + [f"not noticed: {name}" for name in unnoticed]
    report(wheel, len(data), binary)
    for line in wrong:
        print("wrong:", line)
    print(f"macOS cross build: {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
