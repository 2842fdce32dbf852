#!/usr/bin/env python3
"""Build the C++ code with sanitizers and run what they are for.

    python tests/sanitize.py address     AddressSanitizer and UndefinedBehaviorSanitizer:
                                         the C++ tests, then the hostile checkpoints
    python tests/sanitize.py thread      ThreadSanitizer: the C++ tests (decode loop, cancelling)

Run it with the interpreter of a test environment (nanobind, ninja, pytest, hypothesis). Only the
portable kernels are built. LILY_FUZZ_CASES sets the number of mutated checkpoints.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


def build(kind: str) -> Path:
    """Configure and build in build/sanitize-KIND."""
    folder = ROOT / "build" / f"sanitize-{kind}"
    python = "ON" if kind == "address" else "OFF"
    run(
        "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja",
        f"-DLILY_SANITIZE={SANITIZERS[kind]}", "-DLILY_PORTABLE_ONLY=ON", "-DLILY_TESTING=ON",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", f"-DLILY_PYTHON={python}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    run("cmake", "--build", folder, "-j2")
    return folder


def run(*command: str | Path, **environment: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(
        [str(part) for part in command], cwd=ROOT, check=True, env={**os.environ, **environment}
    )


def library(name: str) -> str:
    """Where the compiler finds a library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def hostile(folder: Path) -> None:
    """The mutated checkpoints against a sanitized package."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "lily", site / "lily")
    for extension in folder.glob("*.so"):
        shutil.copy(extension, site / "lily")
    # The interpreter is not sanitized: what the extension needs first must be there first.
    libraries = [library("libasan.so"), library("libstdc++.so.6")]
    run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hostile",
        LD_PRELOAD=" ".join(libraries),
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
        PYTHONPATH=str(site),
        PYTHONMALLOC="malloc",
    )  # fmt: skip


def main() -> None:
    for kind in sys.argv[1:] or list(SANITIZERS):
        folder = build(kind)
        run(folder / "lily_tests", TSAN_OPTIONS="halt_on_error=1")
        if kind == "address":
            hostile(folder)


if __name__ == "__main__":
    main()
