"""A macOS SDK of public parts: enough to compile and link lily's extension, and nothing to ship.

Headers of the C and C++ libraries and the symbols of libSystem come from the ziglang wheel, where
they are Apple's and LLVM's published ones. What that lacks is in `stubs/`, written by hand: the
symbols of libobjc and the frameworks that lily may import. The stub of libc++ is completed with the
symbols that binaries linked on a Mac take from there. A link against these fails on any other name.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

STUBS = Path(__file__).resolve().parent / "stubs"
TARGET = "arm64-macos"
SDK_VERSION = "26.0"

# Where Apple's SDK keeps each stub.
_PLACES = {
    "libc++.tbd": "usr/lib",
    "libobjc.tbd": "usr/lib",
    "CoreGraphics.tbd": "System/Library/Frameworks/CoreGraphics.framework",
    "Foundation.tbd": "System/Library/Frameworks/Foundation.framework",
    "Metal.tbd": "System/Library/Frameworks/Metal.framework",
}
_HEADERS = {
    "ziglang/lib/libc/include/any-darwin-any/": "usr/include",
    "ziglang/lib/libcxx/include/": "usr/include/c++/v1",
    "ziglang/lib/libcxxabi/include/": "usr/include/c++/v1",
}
_SYSTEM = "ziglang/lib/libc/darwin/libSystem.tbd"

# How Apple configures libc++. With its availability marks, what is newer than the deployment target
# is an error instead of a missing symbol on somebody's Mac.
_CONFIG_SITE = """#pragma once
#define _LIBCPP_ABI_VERSION 1
#define _LIBCPP_ABI_NAMESPACE __1
#define _LIBCPP_ABI_FORCE_ITANIUM 0
#define _LIBCPP_ABI_FORCE_MICROSOFT 0
#define _LIBCPP_HAS_THREADS 1
#define _LIBCPP_HAS_MONOTONIC_CLOCK 1
#define _LIBCPP_HAS_TERMINAL 1
#define _LIBCPP_HAS_MUSL_LIBC 0
#define _LIBCPP_HAS_THREAD_API_PTHREAD 1
#define _LIBCPP_HAS_THREAD_API_EXTERNAL 0
#define _LIBCPP_HAS_THREAD_API_WIN32 0
#define _LIBCPP_HAS_THREAD_API_C11 0
#define _LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS 1
#define _LIBCPP_HAS_FILESYSTEM 1
#define _LIBCPP_HAS_RANDOM_DEVICE 1
#define _LIBCPP_HAS_LOCALIZATION 1
#define _LIBCPP_HAS_UNICODE 1
#define _LIBCPP_HAS_WIDE_CHARACTERS 1
#define _LIBCPP_HAS_TIME_ZONE_DATABASE 0
#define _LIBCPP_INSTRUMENTED_WITH_ASAN 0
#define _LIBCPP_PSTL_BACKEND_LIBDISPATCH
#define _LIBCPP_HARDENING_MODE_DEFAULT 2
#define _LIBCPP_ASSERTION_SEMANTIC_DEFAULT 2
#define _LIBCPP_LIBC_PICOLIBC 0
#define _LIBCPP_LIBC_NEWLIB 0
"""


def make(ziglang: Path, known: dict[str, str], folder: Path) -> None:
    """Write the SDK to `folder`. `known` is which library has a symbol on a Mac."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(ziglang) as wheel:
        for name in wheel.namelist():
            for start, place in _HEADERS.items():
                if name.startswith(start) and not name.endswith("/"):
                    path = folder / place / name.removeprefix(start)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(wheel.read(name))
        system = wheel.read(_SYSTEM).decode()
    cxx = folder / "usr/include/c++/v1"
    config = (cxx / "__config").read_text()
    # ziglang passes these definitions to the compiler instead.
    patched = re.sub(r"/\* zig patch: instead of .*\*/", "#include <__config_site>", config)
    if patched == config:
        raise RuntimeError("the libc++ of this ziglang has another __config")
    (cxx / "__config").write_text(patched)
    (cxx / "__config_site").write_text(_CONFIG_SITE)
    for name, place in _PLACES.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        text = (STUBS / name).read_text()
        library = read(STUBS / name).library
        if name == "libc++.tbd":
            names = ", ".join(f"'{symbol}'" for symbol, where in known.items() if where == library)
            exports = f"exports:\n  - targets: [ {TARGET} ]\n    symbols: [ {names} ]\n"
            text = text.replace("exports:\n", exports)
        (folder / place / name).write_text(text)
    (folder / "usr/lib/libSystem.tbd").write_text(_for_arm64(system))
    # The version also goes into the binary, as that of the SDK it was linked with.
    settings = {
        "CanonicalName": f"macosx{SDK_VERSION}",
        "Version": SDK_VERSION,
        "MaximumDeploymentTarget": f"{SDK_VERSION}.99",
    }
    (folder / "SDKSettings.json").write_text(json.dumps(settings))


def _for_arm64(tbd: str) -> str:
    """With arm64 added wherever there is arm64e, and without targets that LLVM cannot read."""

    def targets(found: re.Match[str]) -> str:
        names = [name.strip() for name in found[1].split(",")]
        if "arm64e-macos" not in names:
            return found[0].replace(found[1], "arm64e-macos")
        return f"targets: [ {TARGET}, arm64e-macos ]"

    return re.sub(r"targets:\s*\[([^\]]*)\]", targets, tbd)


@dataclass
class Stub:
    library: str
    symbols: set[str] = field(default_factory=set)
    reviewed: set[str] = field(default_factory=set)  # known from documents only
    published: bool = False  # Apple's list, not ours

    def trusted(self, symbol: str) -> bool:
        """Need no binary of a Mac confirm the symbol?"""
        return self.published or symbol in self.reviewed


def read(tbd: Path) -> Stub:
    """A stub's library, and the symbols that it exports to arm64."""
    text = tbd.read_text()
    name = re.search(r"install-name:\s*'([^']*)'", text)
    if not name:
        raise RuntimeError(f"{tbd}: no install-name")
    stub = Stub(name[1], published=tbd.name == "libSystem.tbd")
    # libSystem's holds one document for each library that it re-exports.
    for block in re.split(r"- targets:", text)[1:]:
        targets, _, rest = block.partition("]")
        if TARGET not in targets:
            continue
        for lists in re.findall(r"(?:weak-|thread-local-)?symbols:\s*\[([^\]]*)\]", rest):
            found = {s.strip().strip("'") for s in lists.split(",") if s.strip()}
            stub.symbols |= found
            if rest.lstrip().startswith("# reviewed"):
                stub.reviewed |= found
    return stub
