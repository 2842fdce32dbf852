#!/usr/bin/env python3
"""Run the CPU device's tests as an arm64 processor would, on an x86-64 Linux, under qemu.

    python3 tests/cross/aarch64.py                   the C++ tests
    python3 tests/cross/aarch64.py tests/ops -k rows the C++ tests, then pytest with these arguments

Not part of CI: emulated code is some twenty times slower. It is for whoever changes what the CPU
device computes, since a Mac whose Metal fails runs exactly this code.

Needs Debian's g++-aarch64-linux-gnu, qemu-user, cmake (3.26 or later) and ninja. For pytest it also
takes Debian's CPython for arm64 (by apt-get, into build/cross; nothing of the system is changed)
and the aarch64 wheels of what the tests import. Tests of Metal are left out: their kernels would be
compiled by a clang that is not emulated.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "cross"
FOLDER = WORK / "aarch64"
SYSTEM = FOLDER / "system"  # Debian's packages for arm64, unpacked
SITE = FOLDER / "site"
PYTHON = FOLDER / "python"
COMPILER = "aarch64-linux-gnu-g++"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
VERSION = "3.11"  # of Debian 12's CPython
WHEELS = [
    "numpy", "tokenizers", "huggingface-hub", "jinja2", "safetensors", "pytest", "hypothesis",
    "nanobind>=3.1,<3.2",
]  # fmt: skip


def run(*command: str | Path, **environment: str) -> None:
    print("$", *command, flush=True)
    arguments = [str(part) for part in command]
    subprocess.run(arguments, cwd=ROOT, check=True, env={**os.environ, **environment})


def build(folder: Path, *options: str) -> None:
    run(
        "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}",
        "-DLILY_TESTING=ON", "-DLILY_STRICT=ON", *options,
    )  # fmt: skip
    run("cmake", "--build", folder, "-j", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2"))


def make_python() -> None:
    """Debian's CPython for arm64 with what the tests import, behind a script that emulates it."""
    if PYTHON.exists():
        return
    state = FOLDER / "apt"
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()  # as if nothing were installed
    options = [
        "-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64",
        "-o", f"Dir::State={state}", "-o", f"Dir::State::status={state / 'status'}",
        "-o", f"Dir::Cache={state}", "-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1",
        "-o", "APT::Install-Recommends=0",
    ]  # fmt: skip
    run("apt-get", *options, "-qq", "update")
    names = [f"python{VERSION}", f"libpython{VERSION}-dev", "libstdc++6"]
    run("apt-get", *options, "-qqy", "--download-only", "install", *names)
    shutil.rmtree(SYSTEM, ignore_errors=True)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, SYSTEM], check=True)
    shutil.rmtree(SITE, ignore_errors=True)
    platforms = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64"]
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--target", SITE, *platforms,
        "--python-version", VERSION, "--only-binary=:all:", *WHEELS,
    )  # fmt: skip
    interpreter = SYSTEM / "usr/bin" / f"python{VERSION}"
    # A shell script, since the kernel cannot start the program itself.
    PYTHON.write_text(
        f'#!/bin/sh\nexport PYTHONHOME={SYSTEM}/usr PYTHONPATH="{SITE}:$PYTHONPATH"\n'
        f'exec qemu-aarch64 -L {SYSTEM} {interpreter} "$@"\n'
    )
    PYTHON.chmod(0o755)


def site(folder: Path) -> Path:
    """The package as it would be installed."""
    package = folder / "site" / "lily"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "lily", package)
    for built in [*folder.glob("*.so"), folder / "lily_tests"]:
        shutil.copy(built, package)
    return package.parent


def main() -> None:
    if platform.machine() != "x86_64":
        sys.exit("written for x86-64: on arm64 run tests/run.py")
    tools = (COMPILER, "qemu-aarch64", "cmake", "ninja")
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        sys.exit(
            f"needs {', '.join(missing)} (apt-get install {PACKAGES}; pip install cmake ninja)"
        )
    arguments = sys.argv[1:]
    folder = FOLDER / ("python-build" if arguments else "build")
    if arguments:
        make_python()
        build(
            folder,
            f"-DPython_EXECUTABLE={PYTHON}",
            f"-DPython_INCLUDE_DIR={SYSTEM}/usr/include/python{VERSION}",
            f"-DCMAKE_CXX_FLAGS=-isystem {SYSTEM}/usr/include",
        )
    else:
        build(folder, "-DLILY_PYTHON=OFF")
    run("qemu-aarch64", "-L", LIBRARIES, folder / "lily_tests")
    if arguments:
        run(
            PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--ignore-glob=*metal*", *arguments,
            PYTHONPATH=str(site(folder)),
        )  # fmt: skip


if __name__ == "__main__":
    main()
