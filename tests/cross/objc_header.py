"""What src/device/metal/objc.h says of Metal, read from its text.

A class is a macro NAME_METHODS with lines METHOD(name, "selector", SIGNATURE). Whatever looks like
such a line must be read, or reading fails: a check that misses a line would say nothing of it.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field

_TYPES = {
    "void": "void",
    "bool": "bool",
    "float": "float",
    "double": "double",
    "uint32_t": "uint32",
    "NSInteger": "int64",
    "NSUInteger": "uint64",
    "void*": "void*",
    "const void*": "const void*",
    "const char*": "const char*",
}


@dataclass(frozen=True)
class Method:
    """`types` are the result's and the parameters', in the words of `objc_header.of_lily`."""

    owner: str
    selector: str
    of_class: bool
    types: tuple[str, ...]

    def __str__(self) -> str:
        sign = "+" if self.of_class else "-"
        result, *parameters = self.types
        return f"{sign}[{self.owner} {self.selector}] {result}({', '.join(parameters)})"


@dataclass
class Header:
    classes: list[str] = field(default_factory=list)
    methods: list[Method] = field(default_factory=list)
    constants: dict[str, tuple[str, int]] = field(default_factory=dict)  # type, value
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # type, field
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # result, parameters


def of_lily(text: str) -> str:
    """A type of objc.h in one word: uint64, object MTLBuffer, object* NSError, struct MTLSize, …"""
    text = re.sub(r"\s*\*", "*", text.strip())
    if text in _TYPES:
        return _TYPES[text]
    if found := re.fullmatch(r"((?:NS|MTL)\w+)(\*{0,2})", text):
        return f"{('struct', 'object', 'object*')[len(found[2])]} {found[1]}"
    raise ValueError(f"objc.h: unknown type {text!r}")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def value(expression: str, names: dict[str, int]) -> int:
    """The value of a constant expression.

    Raises:
        ValueError: It has more in it than whole numbers, names and the operators + - * << |.
    """
    operators = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
        ast.LShift: operator.lshift, ast.BitOr: operator.or_,
    }  # fmt: skip

    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -of(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return int(operators[type(op)](of(left), of(right)))
        raise ValueError(expression)

    try:
        return of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(expression) from None


def read(text: str) -> Header:
    """Read the header.

    Raises:
        ValueError: Something in it is not written as this reader expects.
    """
    text = without_comments(text).replace("\\\n", " ")
    header = Header()
    for owner, body in re.findall(r"#define (\w+)_METHODS\(METHOD, CLASS_METHOD\)([^\n]*)", text):
        header.classes.append(owner)
        for kind, selector, result, parameters in re.findall(
            r'\b(CLASS_METHOD|METHOD)\(\s*\w+,\s*"([^"]+)",\s*([^()]+?)\(([^()]*)\)\s*\)', body
        ):
            types = [of_lily(result), *(of_lily(p) for p in parameters.split(",") if p.strip())]
            header.methods.append(Method(owner, selector, kind == "CLASS_METHOD", tuple(types)))
    written = len(re.findall(r'METHOD\(\s*\w+,\s*"', text))
    if not header.methods or written != len(header.methods):
        raise ValueError(f"objc.h: {written} methods, of which {len(header.methods)} can be read")
    declared = set(re.findall(r"^\s*LILY_OBJC_CLASS\((\w+)\)", text, re.M)) - {"Name"}
    if declared != set(header.classes) - {"NSObject"}:
        raise ValueError(f"objc.h: classes {sorted(declared ^ set(header.classes))}")
    for kind, name, expression in re.findall(r"constexpr (NSU?Integer) (MTL\w+) = ([^;]+);", text):
        header.constants[name] = (of_lily(kind), value(expression, {}))
    for name, body in re.findall(r"struct ((?:MTL|NS)\w+) \{([^{}]*)\};", text):
        fields = re.findall(r"(\w+)\s+([\w\s,]+);", body)
        header.structs[name] = [
            (of_lily(kind), one.strip()) for kind, names in fields for one in names.split(",")
        ]
    for block in re.findall(r'extern "C" \{(.*?)\}', text, re.S):
        for result, name, parameters in re.findall(r"([\w*\s]+?)\s*(\w+)\(([^()]*)\);", block):
            names = [re.sub(r"(?<=[*\s])\w+$", "", p.strip()) for p in parameters.split(",")]
            header.functions[name] = (
                of_lily(result),
                *(of_lily(p) for p in names if p.strip() not in {"", "void"}),
            )
    return header
