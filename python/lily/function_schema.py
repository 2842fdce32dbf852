"""Python functions as tools: JSON schemas from their signatures, and calls with JSON arguments."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from lily.tool_arguments import type_name

SIMPLE: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    None: "null",
    type(None): "null",
}
LISTS = (
    list,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
SECTION = re.compile(r"[A-Z][A-Za-z ]*:")
ITEM = re.compile(r"\*{0,2}(\w+)(?: *\([^)]*\))?: *(.*)")


def function_schema(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A function's description, and the JSON schema of its parameters.

    Raises:
        ValueError: a parameter cannot be given as JSON, or by name.
    """
    description, told = _docstring(function)
    properties: dict[str, Any] = {}
    required = []
    for name, (parameter, hint) in _parameters(function).items():
        schema = _schema(hint, f"{_name(function)}: parameter {name}", ())
        if name in told:
            schema = {**schema, "description": told[name]}
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            schema = schema | _default(parameter.default)
        properties[name] = schema
    schema = {"type": "object", "properties": properties}
    return description, {**schema, "required": required} if required else schema


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call a function with the arguments of a tool call, and give the text for the model.

    Arguments become what the type hints say: members of an Enum, dataclasses, sets. A result that
    is not text becomes JSON. What goes wrong, in the arguments or in the function, becomes a text
    that begins with `error: `, so that the model can try again.

    Raises:
        ValueError: the function is asynchronous, or cannot be a tool.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{_name(function)}: is asynchronous, expected a plain function")
    parameters = _parameters(function)
    try:
        if unknown := [name for name in arguments if name not in parameters]:
            raise ValueError(
                f"{unknown[0]}: unknown, expected {', '.join(parameters) or 'nothing'}"
            )
        given = {}
        for name, (parameter, hint) in parameters.items():
            if name in arguments:
                given[name] = _convert(arguments[name], hint, name)
            elif parameter.default is parameter.empty:
                raise ValueError(f"{name}: missing")
        return _result(function(**given))
    except Exception as error:  # whatever it is, it is for the model to read
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"error: {kind}{error}"


def _result(value: Any) -> str:
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    return str(value)


# Signatures


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Each parameter that a call may name, with its type hint; those like `*args` are left out."""
    annotated = function if hasattr(function, "__name__") else type(function).__call__
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"{_name(function)}: its signature cannot be read: {error}") from None
    found = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{_name(function)}: parameter {name}: cannot be given by name")
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            found[name] = (parameter, hints.get(name, Any))
    return found


def _default(value: Any) -> dict[str, Any]:
    """The default for the schema, where JSON can say it."""
    value = value.value if isinstance(value, enum.Enum) else value
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what `Args:` says of each parameter."""
    told: dict[str, str] = {}
    lines = (inspect.getdoc(function) or "").splitlines()
    heads = [i for i, line in enumerate(lines) if SECTION.fullmatch(line.rstrip())]
    for head, end in pairwise([*heads, len(lines)]):
        if lines[head].rstrip() not in ("Args:", "Arguments:", "Parameters:"):
            continue
        name = ""
        for line in textwrap.dedent("\n".join(lines[head + 1 : end])).splitlines():
            if item := ITEM.fullmatch(line):
                name, told[item[1]] = item[1], item[2]
            elif name:
                told[name] = f"{told[name]} {line.strip()}"
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    return description, {name: text.strip() for name, text in told.items()}


# Types


def _unwrap(hint: Any) -> tuple[Any, str]:
    """The type behind Annotated, NewType, Required and the like, and the description on the way."""
    description = ""
    while True:
        if get_origin(hint) is Annotated:
            notes = [note for note in hint.__metadata__ if isinstance(note, str)]
            description = description or next(iter(notes), "")
            hint = hint.__origin__
        elif get_origin(hint) in (Required, NotRequired):
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        else:
            return hint, description


def _schema(hint: Any, where: str, inside: tuple[Any, ...]) -> dict[str, Any]:
    hint, description = _unwrap(hint)
    schema = _plain_schema(hint, where, inside)
    return {**schema, "description": description} if description else schema


def _plain_schema(hint: Any, where: str, inside: tuple[Any, ...]) -> dict[str, Any]:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin is Literal:
        return _enum(list(args), where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum([member.value for member in hint], where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, where, inside) for arg in args]}
    if origin in LISTS or origin in SETS:
        items = {"items": _schema(args[0], where, inside)} if args else {}
        return {"type": "array", **items, **({"uniqueItems": True} if origin in SETS else {})}
    if origin is tuple:
        return _tuple(args, where, inside)
    if origin in DICTS:
        if args and _unwrap(args[0])[0] is not str:
            raise ValueError(f"{where}: {hint}, expected a dict with str keys")
        values = {"additionalProperties": _schema(args[1], where, inside)} if args else {}
        return {"type": "object", **values}
    if (fields := _fields(hint)) is not None:
        if hint in inside:
            raise ValueError(f"{where}: {hint.__name__} contains itself, write its schema by hand")
        return _object(fields, where, (*inside, hint))
    raise ValueError(f"{where}: {getattr(hint, '__name__', hint)} has no JSON form")


def _enum(values: list[Any], where: str) -> dict[str, Any]:
    if bad := [v for v in values if not isinstance(v, str | int | float | bool | None)]:
        raise ValueError(f"{where}: {bad[0]!r} has no JSON form")
    names = {type_name(value) for value in values}
    return {"type": names.pop(), "enum": values} if len(names) == 1 else {"enum": values}


def _tuple(args: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "array"}
    if args[-1] is Ellipsis:
        return {"type": "array", "items": _schema(args[0], where, inside)}
    items = [_schema(arg, where, inside) for arg in args]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _fields(hint: Any) -> dict[str, tuple[Any, bool]] | None:
    """Type and necessity of each field of a dataclass or TypedDict; None for other types."""
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        # __required_keys__ does not see these two in annotations that are text.
        told = {Required: True, NotRequired: False}
        return {
            name: (kind, told.get(get_origin(kind), name in hint.__required_keys__))
            for name, kind in hints.items()
        }
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        none = dataclasses.MISSING
        return {
            f.name: (hints[f.name], f.default is none and f.default_factory is none)
            for f in dataclasses.fields(hint)
            if f.init
        }
    return None


def _object(
    fields: dict[str, tuple[Any, bool]], where: str, inside: tuple[Any, ...]
) -> dict[str, Any]:
    properties = {n: _schema(kind, f"{where}.{n}", inside) for n, (kind, _) in fields.items()}
    schema = {"type": "object", "properties": properties}
    required = [name for name, (_, needed) in fields.items() if needed]
    return {**schema, "required": required} if required else schema


# Values


def _convert(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as the type that a hint asks for."""
    hint, _ = _unwrap(hint)
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any or hint is object:
        return value
    if hint in SIMPLE:
        return _convert_simple(value, hint, where)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return _convert_enum(value, args if origin is Literal else tuple(hint), where)
    if origin in (Union, types.UnionType):
        return _convert_union(value, args, where)
    if origin in LISTS or origin in SETS or origin is tuple:
        items = _convert_items(value, origin, args, where)
        if origin is tuple:
            return tuple(items)
        return items if origin in LISTS else frozenset(items) if origin is frozenset else set(items)
    if not isinstance(value, Mapping):
        raise _wrong(value, "an object", where)
    if origin in DICTS:
        kind = args[1] if args else Any
        return {key: _convert(item, kind, f"{where}.{key}") for key, item in value.items()}
    fields = _fields(hint) or {}
    if unknown := [key for key in value if key not in fields]:
        raise ValueError(f"{where}.{unknown[0]}: unknown, expected {', '.join(fields)}")
    if missing := [name for name, (_, needed) in fields.items() if needed and name not in value]:
        raise ValueError(f"{where}.{missing[0]}: missing")
    made = {key: _convert(item, fields[key][0], f"{where}.{key}") for key, item in value.items()}
    return hint(**made)


def _convert_simple(value: Any, hint: Any, where: str) -> Any:
    name, found = SIMPLE[hint], type_name(value)
    if name == found:
        return int(value) if name == "integer" else value
    if name == "number" and found == "integer":
        return float(value)
    raise _wrong(
        value, "null" if name == "null" else f"{'an' if name[0] == 'i' else 'a'} {name}", where
    )


def _convert_enum(value: Any, members: tuple[Any, ...], where: str) -> Any:
    plain = [member.value if isinstance(member, enum.Enum) else member for member in members]
    for member, one in zip(members, plain, strict=True):
        if value == one and type_name(value) == type_name(one):
            return member
    raise _wrong(value, "one of " + ", ".join(map(json.dumps, plain)), where)


def _convert_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return _convert(value, kind, where)
        except ValueError as error:
            reasons.append(str(error).removeprefix(f"{where}: "))
    raise ValueError(f"{where}: {'; or '.join(reasons)}")


def _convert_items(value: Any, origin: Any, args: tuple[Any, ...], where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(value, "an array", where)
    kinds = [args[0] if args else Any] * len(value)
    if origin is tuple and args and args[-1] is not Ellipsis:
        kinds = list(args)
        if len(kinds) != len(value):
            raise ValueError(f"{where}: {len(value)} items, expected {len(kinds)}")
    return [
        _convert(item, kind, f"{where}[{i}]")
        for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
    ]


def _wrong(value: Any, expected: str, where: str) -> ValueError:
    return ValueError(f"{where}: {json.dumps(value, ensure_ascii=False)}, expected {expected}")
