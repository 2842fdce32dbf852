"""Compile a `.metal` source to a kernel library.

    python -m softmetal.build SOURCE [--mode plain|detect] [--check] [--out FILE] [-D NAME=VALUE] …

Prints the library's path. If the source does not compile, prints the compiler's messages, with the
lines of the source, and exits with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from softmetal import toolchain
from softmetal.tokens import SourceError
from softmetal.translate import translate

MODES = ("plain", "detect")


class CompileError(Exception):
    """The compiler's messages."""


def build(
    source: str,
    *,
    mode: str = "plain",
    name: str = "program_source",
    language: str = "metal3.1",
    defines: dict[str, str] | None = None,
    include: tuple[Path, ...] = (),
    optimise: int = 2,
) -> Path:
    """Compile a source and return the library's path. Raises CompileError."""
    text = preprocess(source, name=name, language=language, defines=defines, include=include)
    key = hashlib.sha256(
        "\0".join([toolchain.tool_version(), mode, language, str(optimise), text]).encode()
    ).hexdigest()[:24]

    def make(path: Path) -> None:
        translated = _translate(text, language)
        with tempfile.TemporaryDirectory() as folder:
            _compile(translated, path, mode, language, optimise, Path(folder))

    return toolchain.cached(f"{mode}-{key}.so", make)


def check(
    source: str,
    *,
    name: str = "program_source",
    language: str = "metal3.1",
    defines: dict[str, str] | None = None,
    include: tuple[Path, ...] = (),
) -> str:
    """Only look for errors. Returns the warnings, raises CompileError."""
    text = preprocess(source, name=name, language=language, defines=defines, include=include)
    translated = _translate(text, language)
    flags = [*toolchain.device_flags(language), "-DSOFTMETAL_DETECTING=0", "-fsyntax-only"]
    return _clang([*flags, "-"], translated)


def preprocess(
    source: str,
    *,
    name: str,
    language: str,
    defines: dict[str, str] | None,
    include: tuple[Path, ...],
) -> str:
    standard, version = toolchain.LANGUAGES[language]
    flags = ["-x", "c++", standard, "-nostdinc", "-undef", "-E"]
    flags += ["-D__METAL__=1", f"-D__METAL_VERSION__={version}", "-D__HAVE_BFLOAT__=1"]
    flags += [f"-D{key}={value}" for key, value in (defines or {}).items()]
    flags += ["-isystem", str(toolchain.PRELUDE / "include")]
    flags += [f"-I{path}" for path in include]
    return _clang([*flags, "-"], f'#line 1 "{name}"\n{source}', stdout=True)


def _translate(text: str, language: str) -> str:
    try:
        return translate(text, lambdas=language != "metal3.1")
    except SourceError as error:
        raise CompileError(str(error)) from None


def _clang(arguments: list[str], source: str | None = None, *, stdout: bool = False) -> str:
    """Run clang; the output if `stdout`, else the warnings."""
    clang = toolchain.clang()
    if clang is None:
        raise CompileError(f"error: {toolchain.why_missing()}")
    done = subprocess.run(
        [clang, *arguments], input=source, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(_in_metal(done.stderr))
    return done.stdout if stdout else _in_metal(done.stderr)


def _in_metal(messages: str) -> str:
    """The compiler's messages with Metal's names of types."""
    for name, number in (("device", 1), ("threadgroup", 3), ("constant", 4)):
        messages = messages.replace(f"__attribute__((address_space({number})))", name)
    messages = messages.replace("const constant", "constant")
    return messages.replace("__bf16", "bfloat").replace("_Float16", "half")


def _compile(text: str, out: Path, mode: str, language: str, optimise: int, folder: Path) -> None:
    flags = [*toolchain.device_flags(language), f"-DSOFTMETAL_DETECTING={int(mode == 'detect')}"]
    flags += ["-gline-tables-only", "-gdwarf-4", "-w"]
    device = folder / "device.o"
    if mode == "plain":
        _clang([*flags, f"-O{optimise}", "-c", "-o", str(device), "-"], text)
    else:
        _instrument(text, device, flags, optimise, folder)
    # Debian 12's libgcc has no conversion to bf16.
    link = ["-shared", "--rtlib=compiler-rt", str(device), str(_glue()), "-lm", "-o", str(out)]
    _clang(link)


def _instrument(text: str, device: Path, flags: list[str], optimise: int, folder: Path) -> None:
    """Let the sanitizer's pass see every access: it skips those to other address spaces.

    Vectorised code could access more than 16 bytes at once, which the pass skips too.
    """
    sanitize = ["-fsanitize=thread", f"-O{optimise}"]
    raw = ["-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", "-", "-"]
    ir = folder / "device.ll"
    ir.write_text(without_address_spaces(_clang([*flags, *sanitize, *raw], text, stdout=True)))
    narrow = ["-fno-vectorize", "-fno-slp-vectorize"]
    narrow += ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
    # Else `x += 1` counts as a write only.
    narrow += ["-mllvm", "-tsan-instrument-read-before-write=1"]
    _clang(
        ["-w", "-x", "ir", *sanitize, *narrow, "-fPIC", *toolchain.machine_flags(),
         "-c", "-o", str(device), str(ir)]
    )  # fmt: skip


def without_address_spaces(ir: str) -> str:
    """The same LLVM IR with every pointer in the default address space."""
    ir = re.sub(r" ?addrspace\([134]\)", "", ir)
    ir = re.sub(r"(?<=[.])p[134](?=[.i(])", "p0", ir)
    ir = ir.replace("addrspacecast", "bitcast")
    declared: set[str] = set()
    lines = []
    for line in ir.splitlines():
        if line.startswith("declare "):
            function = line[line.index("@") : line.index("(", line.index("@"))]
            if function in declared:
                continue
            declared.add(function)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _glue() -> Path:
    def make(path: Path) -> None:
        _clang(["-O2", "-fPIC", "-fvisibility=hidden", "-w", "-c", "-o", str(path),
                str(toolchain.HERE / "glue.cpp")])  # fmt: skip

    return toolchain.cached(f"glue-{toolchain.tool_version()[:24]}.o", make)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile a .metal source to a kernel library.")
    parser.add_argument("source", type=Path, help="- reads standard input")
    parser.add_argument("--out", type=Path, help="copy the library here")
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--language", choices=sorted(toolchain.LANGUAGES), default="metal3.1")
    parser.add_argument("--check", action="store_true", help="only look for errors and warnings")
    parser.add_argument("--name", help="what messages call the source")
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("-I", dest="include", action="append", default=[], type=Path)
    parser.add_argument("-O", dest="optimise", type=int, default=2, choices=range(4))
    options = parser.parse_args()

    stdin = str(options.source) == "-"
    source = sys.stdin.read() if stdin else options.source.read_text()
    name = options.name or ("program_source" if stdin else str(options.source))
    defines = dict((d if "=" in d else f"{d}=1").split("=", 1) for d in options.defines)
    common: dict[str, Any] = {"name": name, "language": options.language, "defines": defines}
    common["include"] = tuple(options.include)
    try:
        if options.check:
            sys.stderr.write(check(source, **common))
            return 0
        path = build(source, **common, mode=options.mode, optimise=options.optimise)
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.out:
        shutil.copyfile(path, options.out)
        path = options.out
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
