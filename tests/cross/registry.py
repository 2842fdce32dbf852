"""The packages that these checks read, from PyPI: pinned, compared with their sums, kept in
build/cross/downloads. Nothing out of them is run, compiled into lily or shipped."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "cross"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    use: str
    options: tuple[str, ...] = ()


_MAC = ("--platform", "macosx_14_0_arm64", "--platform", "macosx_10_13_universal2")

ZIGLANG = Package(
    "ziglang", "0.17.1", "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54",
    "headers of libSystem and libc++, and libSystem's symbols",
    ("--platform", "manylinux_2_12_x86_64"),
)  # fmt: skip
MLX_METAL = Package(
    "mlx-metal", "0.32.4", "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
    "metal-cpp's headers; a library that was linked on a Mac",
    _MAC,
)  # fmt: skip
PYOBJC = Package(
    "pyobjc-core", "13.0", "5818e3d8cc2677a1e767968ebfe3bc0cb7f80c1f7c19c653ee25ef1cc1b3e188",
    "another binary that was linked on a Mac",
    (*_MAC, "--python-version", "3.12"),
)  # fmt: skip
ABI3INFO = Package(
    "abi3info", "2026.9.25", "d5cbf46f358a4e0cafa171572adb67e5dce14a1b316e3c9f577234dbafcd5214",
    "which of Python's functions are in the stable ABI, and since when",
)  # fmt: skip


class Missing(Exception):
    """Something that the check needs is not to be had here."""


def wheel(package: Package) -> Path:
    """The package's file.

    Raises:
        Missing: It cannot be downloaded.
        RuntimeError: It is not the file that this check was written with.
    """
    folder = WORK / "downloads" / f"{package.name}-{package.version}"
    if not any(folder.glob("*.whl")):
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--retries", "1", "--timeout", "20", *package.options, "-d", str(folder),
            f"{package.name}=={package.version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Missing(f"cannot download {package.name}: {' '.join(errors[-1:])}")
    (path,) = folder.glob("*.whl")
    if hashlib.sha256(path.read_bytes()).hexdigest() != package.sha256:
        path.unlink()
        raise RuntimeError(f"{path.name} is not the file whose sum registry.py notes")
    return path


def skip(reason: Missing) -> NoReturn:
    """End the process: with success, unless LILY_NEED_CROSS says that there must be no skip."""
    print(f"skipped: {reason}")
    needed = os.environ.get("LILY_NEED_CROSS", "") not in {"", "0"}
    if needed:
        print("LILY_NEED_CROSS is set: failed")
    sys.exit(1 if needed else 0)
