"""What Apple's metal-cpp headers say of Metal, read from their text.

In metal-cpp a method is an inline function whose body is one sendMessage of a named selector. So
its selector, its owner and the types of result and parameters stand there in C++, written by Apple.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from cross.objc_header import Method, value, without_comments

_FOLDER = "mlx/include/metal_cpp/"

_TYPES = {
    "void": "void", "bool": "bool", "float": "float", "double": "double",
    "uint32_t": "uint32", "uint64_t": "uint64", "int64_t": "int64",
    "NS::Integer": "int64", "NS::UInteger": "uint64",
    "CFTimeInterval": "double", "NS::TimeInterval": "double",
    "void*": "void*", "const void*": "const void*", "const char*": "const char*", "SEL": "void*",
}  # fmt: skip

_METHOD = re.compile(
    r"_(?:NS|MTL)_INLINE\s+(?P<result>[^;{}()]+?)\s*\b(?P<space>NS|MTL4|MTL)::(?P<owner>\w+)"
    r"(?:<[^<>]*>)?::~?\w+\((?P<parameters>[^{};]*)\)\s*(?:const)?\s*\{(?P<body>[^{}]*)\}"
)
_SEND = re.compile(
    r"sendMessage(?:Safe)?<(?P<result>[^<>]+)>\(\s*(?P<receiver>[^,]+),\s*"
    r"_(?:NS|MTL)_PRIVATE_SEL\((?P<selector>\w+)\)(?P<arguments>[^;]*)\);"
)


@dataclass
class MetalCpp:
    classes: set[str] = field(default_factory=set)
    protocols: set[str] = field(default_factory=set)
    selectors: dict[str, str] = field(default_factory=dict)  # accessor: selector
    bases: dict[str, str] = field(default_factory=dict)
    methods: dict[tuple[str, str], list[Method]] = field(default_factory=dict)
    made: set[tuple[str, str]] = field(default_factory=set)  # (class, alloc or init)
    enums: dict[str, str] = field(default_factory=dict)  # MTL::Name: type
    constants: dict[str, tuple[str, int]] = field(default_factory=dict)
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def family(self, name: str) -> list[str]:
        """The class and what it inherits from, nearest first."""
        found = [name]
        while (base := self.bases.get(found[-1])) and base not in found:
            found.append(base)
        return found

    def type(self, text: str, space: str) -> str:
        """A type in the words of objc_header.of_lily; what has no such word stays as it is."""
        text = re.sub(r"\s+", " ", re.sub(r"\bclass ", "", text)).strip()
        text = re.sub(r"\s*\*", "*", text)
        qualified = text if "::" in text else f"{space}::{text}"
        for known in (text, qualified):
            if known in _TYPES:
                return _TYPES[known]
            if known in self.enums:
                return self.enums[known]
            if known in self.aliases:
                return self.type(self.aliases[known], space)
            pointed = known.removeprefix("const ").removesuffix("*")
            if known.endswith("*") and pointed in self.aliases:
                return self.type(self.aliases[pointed] + "*", space)
        found = re.fullmatch(r"(const )?(?:(\w+)::)?(\w+)(\*{0,2})", text)
        if not found:
            return text
        name = _name(found[2] or space, found[3])
        if found[3] == "_Class":
            name = "NSObject"
        kind = ("struct", "object", "object*")[len(found[4])]
        if kind == "struct" and name not in self.structs:
            return text
        return f"{kind} {name}"


def _name(space: str, name: str) -> str:
    """Objective-C's name of a metal-cpp class."""
    return "NSObject" if (space, name) == ("NS", "Referencing") else space + name


def read(wheel: Path) -> MetalCpp:
    """Read the headers in the mlx-metal wheel.

    Raises:
        ValueError: They are not as this reader expects.
    """
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.removeprefix(_FOLDER): without_comments(archive.read(name).decode())
            for name in archive.namelist()
            if name.startswith((_FOLDER + "Foundation/", _FOLDER + "Metal/"))
        }
    found = MetalCpp()
    spaces = {name: _space(name) for name in texts}
    for name, text in texts.items():
        _read_names(found, text, spaces[name])
    for name, text in texts.items():
        _read_structs(found, text, spaces[name])
    for name, text in texts.items():
        _read_methods(found, text, spaces[name])
    if len(found.selectors) < 1000 or len(found.methods) < 1000:
        raise ValueError(f"{wheel.name}: {len(found.methods)} methods are too few")
    return found


def _space(name: str) -> str:
    if name.startswith("Foundation/"):
        return "NS"
    return "MTL4" if name.startswith("Metal/MTL4") else "MTL"


def _read_names(found: MetalCpp, text: str, space: str) -> None:
    found.classes |= set(re.findall(r"_PRIVATE_DEF_CLS\((\w+)\)", text))
    found.protocols |= set(re.findall(r"_PRIVATE_DEF_PRO\((\w+)\)", text))
    found.selectors |= re.findall(r'_PRIVATE_DEF_SEL\((\w+),\s*"([^"]+)"\)', text)
    for name, bases in re.findall(r"\bclass (?:_NS_EXPORT )?(\w+) : public ([^{]+)\{", text):
        inner = re.search(r"<\s*\w+\s*,\s*([\w:]+)\s*>", bases)
        base = inner[1] if inner else "NS::Object"
        base_space, _, base_name = base.rpartition("::")
        if base_name not in {"objc_object", "_Base"}:
            found.bases[_name(space, name)] = _name(base_space or space, base_name)
    for name, target in re.findall(r"using (\w+)\s*=\s*([\w:\s*]+);", text):
        found.aliases[f"{space}::{name}"] = target
    for base, name, body in re.findall(
        r"_(?:NS|MTL)_(?:ENUM|OPTIONS)\(([\w:]+),\s*(\w+)\)\s*\{([^}]*)\}", text
    ):
        kind = found.type(base, space)
        found.enums[f"{space}::{name}"] = kind
        values: dict[str, int] = {}
        for one, expression in re.findall(r"(\w+)\s*=\s*([^,]+)", body):
            try:
                values[one] = value(expression, values)
            except ValueError:
                continue
        found.constants |= {space + one: (kind, number) for one, number in values.items()}


def _read_structs(found: MetalCpp, text: str, space: str) -> None:
    for name, body in re.findall(r"struct (\w+)\s*\{([^{}]*)\}", text):
        fields = re.findall(r"^\s*([\w:]+)\s+(\w+);", body, re.M)
        found.structs[space + name] = [(found.type(kind, space), one) for kind, one in fields]


def _read_methods(found: MetalCpp, text: str, space: str) -> None:
    for function in _METHOD.finditer(text):
        space, owner = function["space"], _name(function["space"], function["owner"])
        for step in re.findall(r"\bObject::(alloc|init)<[\w:]+>\(", function["body"]):
            found.made.add((owner, step))
        sends = list(_SEND.finditer(function["body"]))
        if len(sends) != 1 or sends[0]["selector"] not in found.selectors:
            continue
        (send,) = sends
        parameters = {}
        for parameter in function["parameters"].split(","):
            if named := re.fullmatch(r"\s*(.*?[\s*&])(\w+)\s*", parameter, re.S):
                parameters[named[2]] = named[1]
        types = [found.type(send["result"], space)]
        for argument in send["arguments"].split(",")[1:]:
            written = parameters.get(argument.strip())
            types.append(found.type(written, space) if written else argument.strip())
        selector = found.selectors[send["selector"]]
        method = Method(owner, selector, "_PRIVATE_CLS(" in send["receiver"], tuple(types))
        found.methods.setdefault((owner, selector), []).append(method)
    for result, name, parameters in re.findall(
        r'extern "C" ([\w:]+\s*\*?)\s*(MTL\w+)\(([^()]*)\);', text
    ):
        types = [p.strip().rsplit(" ", 1)[0] for p in parameters.split(",") if p.strip()]
        found.functions[name] = tuple(found.type(t, space) for t in [result, *types])
