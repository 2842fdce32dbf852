"""Arguments of tool calls: from the text that a model writes to values of the schema's types.

The family writes strings bare and all other values as JSON, so only the schema tells `5` from "5".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

ANY = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
"""The JSON types, by the names that schemas use; all together: anything goes."""

NONE: frozenset[str] = frozenset()

WORDS: dict[str, dict[str, Any]] = {
    "null": {"null": None, "None": None},
    "boolean": {"true": True, "false": False, "True": True, "False": False},
}
"""The types that are a few words, Python's spellings included."""


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that the argument `key` may have by a tool's parameter schema.

    An argument that the schema does not know may be anything, unless `additionalProperties` says
    more.
    """
    types = ANY
    try:
        for one in _argument(schema, schema, key, set()):
            types &= one
    except RecursionError:
        return ANY
    return types or ANY


def _argument(
    schema: Any, root: Mapping[str, Any], key: str, seen: set[str]
) -> Iterator[frozenset[str]]:
    """What each part of an object's schema says of the argument `key`."""
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield schema_types(properties[key], root)
    elif isinstance(extra := schema.get("additionalProperties"), Mapping):
        yield schema_types(extra, root)
    if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        seen.add(ref)
        yield from _argument(resolve(ref, root), root, key, seen)
    for part in _list(schema.get("allOf")):
        yield from _argument(part, root, key, seen)
    for word in ("anyOf", "oneOf"):
        if parts := _list(schema.get(word)):
            options = [list(_argument(part, root, key, seen)) for part in parts]
            yield NONE.union(*(types for option in options for types in option or [ANY]))


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a schema admits; its references are within `root`."""
    return _types(schema, root, {})


def _types(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]]
) -> frozenset[str]:
    """JSON types that a schema admits, `number` always together with `integer`.

    Follows `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref`; what it does not
    understand admits everything. `known` holds references that were followed, so that each is
    followed once.
    """
    if not isinstance(schema, Mapping):
        return ANY
    types = _declared(schema)
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in known:
            known[ref] = ANY  # as far as it refers to itself
            known[ref] = _types(resolve(ref, root), root, known)
        types &= known[ref]
    for part in _list(schema.get("allOf")):
        types &= _types(part, root, known)
    for word in ("anyOf", "oneOf"):
        if parts := _list(schema.get(word)):
            types &= NONE.union(*(_types(part, root, known) for part in parts))
    return types or ANY


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else _list(kind)
    types = frozenset(name for name in names if isinstance(name, str)) & ANY or ANY
    if "number" in types:
        types |= {"integer"}
    if "const" in schema:
        types &= {type_name(schema["const"])}
    if members := _list(schema.get("enum")):
        types &= {type_name(member) for member in members}
    if types == ANY:
        if "properties" in schema:
            return frozenset({"object"})
        if "items" in schema:
            return frozenset({"array"})
    return types or ANY


def resolve(ref: str, root: Mapping[str, Any]) -> Any:
    """What a local reference such as `#/$defs/Unit` points to; None if nothing."""
    found: Any = root if ref.startswith("#") else None
    for step in ref.lstrip("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def type_name(value: Any) -> str:
    """The JSON type of a parsed value; a number without a fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def parse_value(text: str, types: frozenset[str]) -> Any:
    """The value that `text` stands for.

    If it reads as one of the types other than string, it is that; else it stays text, also where
    the schema does not admit a string.
    """
    if types == {"string"}:
        return text
    for kind, words in WORDS.items():
        if kind in types and text in words:
            return words[text]
    try:
        value = json.loads(text)
        to_json(value).encode()  # no text: half a surrogate pair; no JSON: NaN, 1e999
    except (ValueError, RecursionError):
        return text
    kind = type_name(value)
    if isinstance(value, str) or kind not in types:
        return text
    return int(value) if kind == "integer" and "number" not in types else value


def to_json(value: Any) -> str:
    """JSON as arguments are written: readable, and never an invalid number."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class Argument:
    """One argument's value while it comes, as JSON.

    A string is written as it comes, as soon as it can be nothing else; other values when complete.

    Args:
        types: JSON types that the value may have.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        others = types - {"string"}
        self._waits = "string" not in types or not others <= WORDS.keys()
        self._words = [word for kind in others for word in WORDS.get(kind, ())]
        self._text: list[str] = []
        self._is_string = False

    def push(self, text: str) -> str:
        """JSON that became certain."""
        self._text.append(text)
        if self._waits or not text:
            return ""
        if self._is_string:
            return to_json(text)[1:-1]
        so_far = "".join(self._text)
        if any(word.startswith(so_far) for word in self._words):
            return ""
        self._is_string = True
        return to_json(so_far)[:-1]

    def finish(self) -> tuple[Any, str]:
        """The value, and the rest of its JSON."""
        text = "".join(self._text)
        if self._is_string:
            return text, '"'
        value = parse_value(text, self._types)
        return value, to_json(value)
