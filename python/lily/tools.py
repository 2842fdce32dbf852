"""Tools: what a model may call, checked before it is told of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lily.function_schema import call_function, function_schema

__all__ = [
    "Tool",
    "ToolChoice",
    "call_function",
    "check_tool_choice",
    "function_tool",
    "parse_tools",
]

NAME = re.compile(r"[\w./:-]{1,64}")
KEYS = ("name", "description", "parameters", "strict")


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: letters, digits and `_ - . : /`, at most 64.
        description: what it does, for the model.
        parameters: JSON schema of an object; its properties are the parameters.
        strict: whether the caller wants arguments to follow the schema without exception. Only
            carried here.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=_no_parameters, hash=False)
    strict: bool = False

    def spec(self) -> dict[str, Any]:
        """The form that chat templates and the OpenAI API expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


def parse_tools(
    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., Any]] | None,
) -> tuple[Tool, ...]:
    """Tools in the forms that callers give.

    Args:
        tools: each a `Tool`, a Python function (see `function_tool`), or a mapping: the OpenAI form
            `{"type": "function", "function": {...}}` or the inner part alone.

    Raises:
        ValueError: something in a tool is not as it must be, or two have the same name; the
            message says where.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ValueError(f"tools: {type(tools).__name__}, expected a list")
    parsed: list[Tool] = []
    for i, given in enumerate(tools):
        tool = _parse_tool(given, f"tools[{i}]")
        for j, other in enumerate(parsed):
            if other.name == tool.name:
                raise ValueError(f"tools[{i}]: name {tool.name!r} is that of tools[{j}] too")
        parsed.append(tool)
    return tuple(parsed)


def function_tool(function: Callable[..., Any]) -> Tool:
    """A tool from a Python function.

    The description is the docstring up to its sections. Parameters come from the type hints:
    str, int, float, bool, None, lists, tuples, sets, dicts with str keys, Literal, Enum, unions,
    TypedDict and dataclasses; without a hint, anything goes. Their descriptions come from the
    docstring's `Args:` or from `Annotated[..., "description"]`. Those with a default are optional.

    Raises:
        ValueError: the function has no name of the allowed form, or a parameter cannot be told in
            JSON.
    """
    name = getattr(function, "__name__", "")
    description, parameters = function_schema(function)
    spec = {"name": name, "description": description, "parameters": parameters}
    return _parse_function(spec, name or "function")


def _parse_tool(tool: Any, where: str) -> Tool:
    if isinstance(tool, Tool):
        return _parse_function({key: getattr(tool, key) for key in KEYS}, where)
    if isinstance(tool, Mapping):
        kind = tool.get("type", "function")
        if kind != "function":
            raise ValueError(f'{where}.type: {kind!r}, expected "function"')
        if "function" not in tool:
            return _parse_function({key: tool[key] for key in tool if key != "type"}, where)
        if extra := [key for key in tool if key not in ("type", "function")]:
            raise ValueError(f"{where}.{extra[0]}: unknown, expected type and function")
        if not isinstance(tool["function"], Mapping):
            found = type(tool["function"]).__name__
            raise ValueError(f"{where}.function: {found}, expected an object")
        return _parse_function(tool["function"], f"{where}.function")
    if callable(tool):
        try:
            return function_tool(tool)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    raise ValueError(f"{where}: {type(tool).__name__}, expected a tool object or a function")


def _parse_function(spec: Mapping[str, Any], where: str) -> Tool:
    if extra := [key for key in spec if key not in KEYS]:
        raise ValueError(f"{where}.{extra[0]}: unknown, expected one of {', '.join(KEYS)}")
    name, description = spec.get("name"), spec.get("description")
    if not isinstance(name, str):
        raise ValueError(f"{where}.name: {name!r}, expected a string")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{where}.name: {name!r}, expected 1 to 64 letters, digits or any of _ - . : /"
        )
    if not isinstance(description, str | None):
        raise ValueError(f"{where}.description: {description!r}, expected a string")
    if not isinstance(strict := spec.get("strict"), bool | None):
        raise ValueError(f"{where}.strict: {strict!r}, expected true or false")
    parameters = spec.get("parameters")
    if parameters is None:
        parameters = _no_parameters()
    _check_parameters(parameters, f"{where}.parameters")
    return Tool(name, description or "", parameters, bool(strict))


def _check_parameters(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: {type(schema).__name__}, expected a JSON schema object")
    if schema.get("type", "object") != "object":
        raise ValueError(f'{where}.type: {schema["type"]!r}, expected "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError(f"{where}.properties: {type(properties).__name__}, expected an object")
    for key, value in properties.items():
        if not isinstance(value, Mapping | bool):
            found = type(value).__name__
            raise ValueError(f"{where}.properties.{key}: {found}, expected a JSON schema")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"{where}.required: {required!r}, expected a list of names")
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools.

    Attributes:
        mode: "auto": as it likes; "none": not; "required": at least once.
        name: with "required", the tool that it calls; None: any.
    """

    mode: Literal["auto", "none", "required"]
    name: str | None = None


def check_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The normal form of a `tool_choice`.

    Args:
        choice: "auto", "none", "required", a tool's name, the OpenAI form
            `{"type": "function", "function": {"name": ...}}`, or None: "auto" if there are tools,
            "none" otherwise.
        tools: what there is to choose from.

    Raises:
        ValueError: it is none of these, names no tool, or requires a call without tools.
    """
    if isinstance(choice, ToolChoice):
        choice = {"function": {"name": choice.name}} if choice.name else choice.mode
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice == "auto":
        return ToolChoice("auto")
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        if not tools:
            raise ValueError("tool_choice: 'required', but there are no tools")
        return ToolChoice("required")
    where, name = "tool_choice", choice
    if isinstance(choice, Mapping):
        if choice.get("type", "function") != "function":
            raise ValueError(f'tool_choice.type: {choice["type"]!r}, expected "function"')
        function = choice.get("function")
        if not isinstance(function, Mapping):
            found = type(function).__name__
            raise ValueError(f"tool_choice.function: {found}, expected an object with a name")
        where, name = "tool_choice.function.name", function.get("name")
    if not isinstance(name, str):
        raise ValueError(
            f'{where}: {name!r}, expected "auto", "none", "required" or the name of a tool'
        )
    names = [tool.name for tool in tools]
    if name not in names:
        known = ", ".join(map(repr, names)) or "no tools are given"
        raise ValueError(f"{where}: {name!r}, expected the name of a tool: {known}")
    return ToolChoice("required", name)
