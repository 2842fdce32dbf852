"""The messages of src/device/metal/objc.h in Objective-C++, for a compiler with Apple's headers.

`source` sends each message once, unevaluated: what it is given passes for a parameter of the stated
kind only (an enumeration counts as the number below it), and what comes back must be of the stated
kind. So a wrong selector, width, sign or class does not compile.

    python3 tests/cross/signatures.py > signatures.mm
    clang++ -std=c++20 -fsyntax-only -Wno-unguarded-availability signatures.mm
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cross.objc_header import Header, Method, read

HEADER = Path(__file__).resolve().parents[2] / "src" / "device" / "metal" / "objc.h"
# Of the rest there are objects, but no classes that a program may name.
CLASSES = {
    "NSObject", "NSMethodSignature", "NSString", "NSError", "NSProcessInfo", "MTLCompileOptions",
    "MTLComputePipelineDescriptor", "MTLComputePipelineReflection", "MTLResidencySetDescriptor",
    "MTLArchitecture",
}  # fmt: skip

PREAMBLE = """\
#include <type_traits>
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

// The number below an enumeration, or the type itself.
template <class T, bool = std::is_enum_v<T>>
struct Below { using type = T; };
template <class T>
struct Below<T, true> { using type = std::underlying_type_t<T>; };
template <class T>
using below = typename Below<std::remove_cv_t<T>>::type;

template <class T, unsigned bytes, bool is_signed>
constexpr bool whole = std::is_integral_v<below<T>> && !std::is_same_v<below<T>, bool> &&
                       sizeof(T) == bytes && std::is_signed_v<below<T>> == is_signed;
template <class T>
concept is_uint64 = whole<T, 8, false>;
template <class T>
concept is_int64 = whole<T, 8, true>;
template <class T>
concept is_uint32 = whole<T, 4, false>;
template <class T>
concept is_bool = std::is_same_v<T, bool>;
template <class T>
concept is_double = std::is_same_v<T, double>;
template <class T>
concept is_float = std::is_same_v<T, float>;
template <class T>
concept is_void = std::is_void_v<T>;
template <class T>
concept is_pointer = std::is_pointer_v<T> && !std::is_convertible_v<T, id>;
template <class T>
concept is_bytes = std::is_same_v<T, const void*>;
template <class T>
concept is_text = std::is_same_v<T, const char*>;
"""

KINDS = {
    "void": "void", "bool": "bool", "float": "float", "double": "double", "uint32": "uint32",
    "int64": "int64", "uint64": "uint64", "void*": "pointer", "const void*": "bytes",
    "const char*": "text",
}  # fmt: skip


def source(header: Header) -> str:
    """The program; it has no main and is never run."""
    given = [
        f"struct given_{kind} {{ template <is_{kind} T> operator T() const; }};"
        for kind in dict.fromkeys(KINDS.values())
        if kind != "void"
    ]
    checks = [_check(number, method) for number, method in enumerate(header.methods)]
    sizes = [
        f"static_assert(sizeof({name}) == {8 * len(fields)});"
        for name, fields in header.structs.items()
    ]
    return "\n".join([PREAMBLE, *given, "", *sizes, "", *checks]) + "\n"


def reference(name: str) -> str:
    """How Objective-C writes a reference to an object."""
    return f"{name}*" if name in CLASSES else f"id<{name}>"


def _check(number: int, method: Method) -> str:
    result, *parameters = method.types
    names = method.selector.split(":")
    if parameters:
        said = " ".join(f"{name}:{_given(p)}" for name, p in zip(names, parameters, strict=False))
    else:
        said = method.selector
    receiver = method.owner if method.of_class else f"({reference(method.owner)})nullptr"
    kind, _, name = result.partition(" ")
    if kind == "object":
        test = f"std::is_convertible_v<R{number}, {reference(name)}>"
    else:
        test = f"is_{KINDS[result]}<R{number}>"
    return f"using R{number} = decltype([{receiver} {said}]);\nstatic_assert({test}); // {method}"


def _given(parameter: str) -> str:
    kind, _, name = parameter.partition(" ")
    if kind == "object":
        return f"({reference(name)})nullptr"
    if kind == "object*":
        return f"({reference(name)}*)nullptr"
    return f"{name}{{}}" if kind == "struct" else f"given_{KINDS[parameter]}{{}}"


if __name__ == "__main__":
    sys.stdout.write(source(read(HEADER.read_text(encoding="utf-8"))))
