#!/usr/bin/env python3
"""Compare src/device/metal/objc.h with Apple's own C++ headers for Metal.

    python3 tests/cross/metal_selectors.py

A wrong selector or type in objc.h compiles, and fails on somebody's Mac. metal-cpp states the same
methods; the mlx-metal wheel ships it. It is read as text: no line of it is compiled or kept.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from cross import metal_cpp, objc_header, registry  # noqa: E402
from cross.metal_cpp import MetalCpp  # noqa: E402
from cross.objc_header import Header, Method  # noqa: E402

OBJC_H = ROOT / "src/device/metal/objc.h"

# Methods that metal-cpp does not have, and how we know them.
_SIGNATURE = "metal-cpp never asks for types; Foundation's NSMethodSignature.h documents "
NOT_IN_METAL_CPP = {
    "+[NSString stringWithUTF8String:] object NSString(const char*)": (
        "metal-cpp makes strings with stringWithCString:encoding:; Foundation documents this one as"
        " + (instancetype)stringWithUTF8String:(const char *)nullTerminatedCString"
    ),
    "-[NSMethodSignature numberOfArguments] uint64()": (
        _SIGNATURE + "@property (readonly) NSUInteger numberOfArguments"
    ),
    "-[NSMethodSignature getArgumentTypeAtIndex:] const char*(uint64)": (
        _SIGNATURE + "- (const char *)getArgumentTypeAtIndex:(NSUInteger)idx"
    ),
    "-[NSMethodSignature methodReturnType] const char*()": (
        _SIGNATURE + "@property (readonly) const char *methodReturnType"
    ),
}

# Functions of the Objective-C runtime: its <objc/*.h>, except for the pool's, which are clang's.
FUNCTIONS = {
    "objc_getClass": ("void*", "const char*"),  # id objc_getClass(const char *name)
    "sel_registerName": ("void*", "const char*"),  # SEL sel_registerName(const char *str)
    "objc_msgSend": ("void",),  # void objc_msgSend(void); cast before it is called
    "objc_autoreleasePoolPush": ("void*",),  # clang's documentation of ARC, "Runtime support"
    "objc_autoreleasePoolPop": ("void", "void*"),
}


def differences(header: Header, apple: MetalCpp) -> list[str]:
    """What objc.h says otherwise than metal-cpp, one line each."""
    wrong = [
        f"{owner}: metal-cpp has no such class or protocol"
        for owner in header.classes
        if owner not in {"NSObject", "NSMethodSignature"} | apple.classes | apple.protocols
    ]
    for method in header.methods:
        wrong += _method(method, apple)
    for name, (kind, number) in header.constants.items():
        if name not in apple.constants:
            wrong.append(f"{name}: metal-cpp has no such constant")
            continue
        apple_kind, apple_number = apple.constants[name]
        # NSError hands out every code as an NSInteger.
        if "Error" in name:
            apple_kind = "int64"
        if (kind, number) != (apple_kind, apple_number):
            wrong.append(f"{name}: {kind} {number}; metal-cpp: {apple_kind} {apple_number}")
    for name, fields in header.structs.items():
        if fields != apple.structs.get(name):
            wrong.append(f"{name}: {fields}; metal-cpp: {apple.structs.get(name)}")
    for name, types in header.functions.items():
        known = FUNCTIONS.get(name) or apple.functions.get(name)
        # Our MTLCreateSystemDefaultDevice returns a plain pointer.
        if known and known[0].startswith("object "):
            known = ("void*", *known[1:])
        if types != known:
            wrong.append(f"{name}: {types}; known: {known}")
    return wrong


def _method(method: Method, apple: MetalCpp) -> list[str]:
    name = str(method)
    # objc_getClass finds classes; sent to a protocol's name, a message would go to nil.
    if method.of_class and method.owner not in apple.classes:
        return [f"{name}: metal-cpp has no class of this name"]
    if method.selector == "new" and method.of_class:
        # alloc and init at once. NSObject declares them; metal-cpp says for which classes.
        made = {(method.owner, "alloc"), (method.owner, "init")} <= apple.made
        good = made and method.types == (f"object {method.owner}",)
        return [] if good else [f"{name}: not alloc and init of metal-cpp"]
    known = [m for owner in apple.family(method.owner) for m in _of(apple, owner, method)]
    if name in NOT_IN_METAL_CPP:
        return [f"{name}: metal-cpp has it now"] if known else []
    if not known:
        return [f"{name}: metal-cpp has no such method"]
    if any(_same(method, other, apple) for other in known):
        return []
    return [f"{name}; metal-cpp: {', '.join(sorted({str(m) for m in known}))}"]


def _of(apple: MetalCpp, owner: str, method: Method) -> list[Method]:
    return apple.methods.get((owner, method.selector), [])


def _same(ours: Method, theirs: Method, apple: MetalCpp) -> bool:
    if ours.of_class != theirs.of_class or len(ours.types) != len(theirs.types):
        return False

    def accepts(declared: str, given: str) -> bool:
        # A parameter may inherit from what is declared: a buffer is an allocation.
        kind, _, name = given.partition(" ")
        return declared in {given, *(f"object {c}" for c in apple.family(name) if kind == "object")}

    pairs = zip(theirs.types[1:], ours.types[1:], strict=True)
    return ours.types[0] == theirs.types[0] and all(accepts(*pair) for pair in pairs)


def damaged(header: Header) -> list[tuple[str, Header]]:
    """The header once more for each statement in it that can be wrong, with that one wrong."""
    found = []
    for i, method in enumerate(header.methods):
        ones = [
            replace(method, selector=method.selector + "x"),
            replace(method, of_class=not method.of_class),
            replace(method, types=(*method.types, "uint64")),
        ]
        for j, kind in enumerate(method.types):
            for other in ("uint64", "int64", "object MTLLibrary"):
                if kind != other:
                    types = (*method.types[:j], other, *method.types[j + 1 :])
                    ones.append(replace(method, types=types))
        for one in ones:
            methods = [*header.methods[:i], one, *header.methods[i + 1 :]]
            found.append((str(one), replace(header, methods=methods)))
    for name, (kind, number) in header.constants.items():
        constants = {**header.constants, name: (kind, number + 1)}
        found.append((f"{name} = {number + 1}", replace(header, constants=constants)))
    return found


def elsewhere() -> list[str]:
    """Places outside objc.h that talk to the runtime past its list."""
    words = re.compile(r"\b(objc_\w+|sel_registerName|NSClassFromString|dlsym)\s*\(")
    return [
        f"{path.relative_to(ROOT)}: {found[1]}"
        for path in sorted((ROOT / "src").rglob("*"))
        if path.suffix in {".h", ".cpp"} and path != OBJC_H
        for found in words.finditer(objc_header.without_comments(path.read_text()))
    ]


def main() -> int:
    try:
        wheel = registry.wheel(registry.MLX_METAL)
    except registry.Missing as reason:
        registry.skip(reason)
    header = objc_header.read(OBJC_H.read_text())
    apple = metal_cpp.read(wheel)
    wrong = differences(header, apple)
    wrong += [f"{place} outside objc.h" for place in elsewhere()]
    # A check that notices nothing would look the same.
    wrong_ones = damaged(header)
    wrong += [f"not noticed: {name}" for name, one in wrong_ones if not differences(one, apple)]
    for line in wrong:
        print("wrong:", line)
    print(
        f"objc.h against {wheel.name}:"
        f" {len(header.classes)} classes, {len(header.methods)} methods,"
        f" {len(header.constants)} constants, {len(header.structs)} structs,"
        f" {len(header.functions)} functions; {len(NOT_IN_METAL_CPP)} known otherwise;"
        f" {len(wrong_ones)} damaged copies noticed; {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
