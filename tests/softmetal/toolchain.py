"""The compiler, its flags, and the cache that its products are kept in."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRELUDE = HERE / "prelude"

# Older versions refuse the prelude.
CLANG_VERSION = 22

_DEVICE_FLAGS = [
    "-x", "c++", "-nostdinc", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
    "-Wno-psabi",
    # Else clang may duplicate a call that all lanes have to make together.
    "-fconvergent-functions",
    "-Xclang", "-cl-single-precision-constant",
    # A product and a sum are not fused behind the source's back; bf16 is rounded at every step.
    "-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none",
    "-Xclang", "-fbfloat16-excess-precision=none",
    "-fno-strict-aliasing", "-fvisibility=hidden", "-fPIC",
    # The emulator switches stacks under the code's feet.
    "-fno-stack-protector",
    # Reports name files as the source does.
    "-fdebug-compilation-dir=.",
    "-include", str(PRELUDE / "prelude.h"),
]  # fmt: skip

# Kernels stay within the language that the library is compiled for at run time: C++14 up to
# Metal 3.2. What clang would let pass as an extension is an error.
LANGUAGES = {
    "metal3.1": ("-std=c++14", 310),
    "metal4.0": ("-std=c++17", 400),
}
_WARNINGS = [
    "-Wall", "-Wextra",
    "-Werror=implicit-float-conversion", "-Wno-implicit-int-float-conversion",
    "-Werror=c++17-extensions", "-Werror=c++20-extensions",
    "-Werror=c++23-extensions", "-Werror=c++14-extensions",
    "-Wno-unused-const-variable", "-Wno-unused-function", "-Wno-unused-parameter",
    "-Wno-unknown-pragmas", "-Wno-unused-local-typedef", "-Wno-missing-field-initializers",
    "-Wno-pass-failed",
]  # fmt: skip


@functools.cache
def clang() -> str | None:
    """Path of clang++-22, or None. LILY_CLANG names another one of that version."""
    for name in (os.environ.get("LILY_CLANG"), f"clang++-{CLANG_VERSION}", "clang++"):
        path = shutil.which(name) if name else None
        if path and f"version {CLANG_VERSION}." in _output([path, "--version"]):
            return path
    return None


def why_missing() -> str | None:
    """Why kernels cannot be compiled here, or None. Tests are skipped for it.

    Raises:
        RuntimeError: LILY_NEED_CLANG says that there must be no such skip.
    """
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "aarch64"}:
        return "the software Metal runs on Linux, x86-64 or aarch64"
    if not clang():
        packages = f"clang-{CLANG_VERSION} libclang-rt-{CLANG_VERSION}-dev"
        reason = f"needs clang-{CLANG_VERSION} (apt-get install {packages})"
        if os.environ.get("LILY_NEED_CLANG"):
            raise RuntimeError(f"LILY_NEED_CLANG is set; the software Metal {reason}")
        return reason
    return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Wider instructions where they change no result: conversions of half, fma."""
    if platform.machine() == "x86_64":
        flags = set(Path("/proc/cpuinfo").read_text().split())
        if {"avx2", "fma", "f16c", "bmi2"} <= flags:
            return ("-march=x86-64-v3",)
    return ()


def device_flags(language: str) -> list[str]:
    standard, _ = LANGUAGES[language]
    return [*_DEVICE_FLAGS, standard, *_WARNINGS, *machine_flags()]


_TOOLS = (
    "tokens.py", "declarations.py", "rules.py", "translate.py", "toolchain.py", "build.py",
    "runtime.h", "glue.cpp",
)  # fmt: skip


@functools.cache
def tool_version() -> str:
    """Changes with everything that a compiled library depends on beside its source."""
    digest = hashlib.sha256()
    files = [HERE / name for name in _TOOLS]
    for path in sorted([*files, *(p for p in PRELUDE.rglob("*") if p.is_file())]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_output([clang() or "", "--version"]).encode() if clang() else b"")
    digest.update(" ".join(machine_flags()).encode())
    return digest.hexdigest()


def cache_folder() -> Path:
    folder = Path(os.environ.get("LILY_SOFTMETAL_CACHE", ROOT / "build" / "softmetal"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """`name` in the cache folder, written by `make` if it is not there.

    Several processes may ask for one name at a time: one makes it, the others wait.
    """
    path = cache_folder() / name
    if path.exists():
        return path
    lock = path.with_name(f"{name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
                    new = Path(scratch) / name
                    make(new)
                    new.replace(path)
        finally:
            lock.unlink(missing_ok=True)
    return path
