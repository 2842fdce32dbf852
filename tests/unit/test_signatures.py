"""The messages that the Metal device sends, stated in Objective-C++.

On a Mac against Apple's headers. Elsewhere against headers made up from the same list, which shows
that the statement can be compiled, and that a wrong one cannot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cross.objc_header import Header, Method, read
from cross.signatures import CLASSES, HEADER, reference, source

WRONG = ["-Werror", "-Wno-deprecated-declarations", "-Wno-unguarded-availability"]
WORDS = {
    "uint64": "unsigned long", "int64": "long", "uint32": "unsigned",
    "void": "void", "bool": "bool", "float": "float", "double": "double",
    "void*": "SEL", "const void*": "const void*", "const char*": "const char*",
}  # fmt: skip


def header() -> Header:
    return read(HEADER.read_text(encoding="utf-8"))


def compiled(text: str, folder: Path, *options: str) -> str:
    """What the compiler complains of."""
    file = folder / "signatures.mm"
    file.write_text(text)
    compiler = "clang++" if sys.platform == "darwin" else "clang++-22"
    command = [compiler, "-std=c++20", "-fsyntax-only", *WRONG, *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(sys.platform != "darwin", reason="needs Apple's headers")
def test_messages_are_those_of_apples_headers(tmp_path: Path) -> None:
    assert compiled(source(header()), tmp_path) == ""


def made_up(found: Header) -> str:
    """Declarations of everything that the list names."""
    names, structs = found.classes, found.structs.items()
    text = [f"@class {n};" if n in CLASSES else f"@protocol {n};" for n in names]
    text += [
        f"struct {name} {{ {' '.join(f'{WORDS[kind]} {field};' for kind, field in fields)} }};"
        for name, fields in structs
    ]
    for name in names:
        text.append(_opening(name))
        text += [_declaration(m) for m in found.methods if m.owner == name]
        text.append("@end")
    return "\n".join(text)


def _opening(name: str) -> str:
    if name == "NSObject":
        return "__attribute__((objc_root_class)) @interface NSObject"
    return f"@interface {name} : NSObject" if name in CLASSES else f"@protocol {name}"


def _declaration(method: Method) -> str:
    result, *parameters = map(_word, method.types)
    names = method.selector.split(":")
    said = " ".join(
        f"{n}:({p})a{i}" for i, (n, p) in enumerate(zip(names, parameters, strict=False))
    )
    sign = "+" if method.of_class else "-"
    return f"{sign} ({result}){said or method.selector};"


def _word(kind: str) -> str:
    head, _, name = kind.partition(" ")
    if head == "object":
        return reference(name)
    if head == "object*":
        return f"{reference(name)}*"
    return name if head == "struct" else WORDS[kind]


@pytest.fixture
def apple(tmp_path: Path) -> Path:
    if sys.platform == "darwin":
        pytest.skip("has Apple's headers")
    if shutil.which("clang++-22") is None:
        assert "LILY_NEED_CLANG" not in os.environ
        pytest.skip("needs clang 22")
    for framework in ("Foundation", "Metal"):
        (tmp_path / framework).mkdir()
        (tmp_path / framework / f"{framework}.h").write_text('#include "../made_up.h"\n')
    (tmp_path / "made_up.h").write_text("#pragma once\n" + made_up(header()))
    return tmp_path


OPTIONS = ("-fobjc-runtime=macosx-14", "-Wno-objc-root-class")


def test_the_statement_compiles(apple: Path) -> None:
    assert compiled(source(header()), apple, f"-I{apple}", *OPTIONS) == ""


@pytest.mark.parametrize("kind", ["uint64", "int64", "bool", "double", "const char*", "void*"])
def test_a_wrong_type_does_not_compile(apple: Path, kind: str) -> None:
    """One parameter or result of this kind, stated as another."""
    found = header()
    at, method = next((i, m) for i, m in enumerate(found.methods) if kind in m.types)
    types = tuple("float" if t == kind else t for t in method.types)
    found.methods[at] = replace(method, types=types)
    assert "error:" in compiled(source(found), apple, f"-I{apple}", *OPTIONS)


def test_a_wrong_selector_or_class_does_not_compile(apple: Path) -> None:
    for change in ({"selector": "retained"}, {"owner": "MTLBuffer"}):
        found = header()
        at = next(i for i, m in enumerate(found.methods) if m.owner == "MTLCommandQueue")
        found.methods[at] = replace(found.methods[at], **change)
        assert "error:" in compiled(source(found), apple, f"-I{apple}", *OPTIONS)
