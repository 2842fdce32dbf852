"""Tools: the forms that callers give, schemas from type hints, calls with JSON arguments."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.tool_arguments import ANY, argument_types, parse_value, type_name
from lily.tools import (
    Tool,
    ToolChoice,
    call_function,
    check_tool_choice,
    function_tool,
    parse_tools,
)

F = {"name": "f", "description": "Does f.", "parameters": {"type": "object", "properties": {}}}


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclasses.dataclass
class Place:
    name: str
    height: float = 0.0
    tags: set[str] = dataclasses.field(default_factory=set)


class Options(TypedDict):
    days: int
    unit: NotRequired[Unit]


@dataclasses.dataclass
class Node:
    next: Node | None = None


def weather(
    place: Place,
    unit: Unit = Unit.KELVIN,
    *,
    days: Annotated[int, "how many"] = 1,
    mode: Literal["fast", "exact"] | None = None,
    extra: Any = None,
) -> str:
    """Look up the weather.

    Uses no network.

    Args:
        place: where; a name
            with more to it.
        unit (Unit): of the temperatures.

    Returns:
        A sentence.
    """
    return f"{place.name} {place.height} {sorted(place.tags)} {unit.name} {days} {mode} {extra}"


# Forms


def test_all_forms_of_a_tool_are_the_same() -> None:
    tool = Tool("f", "Does f.", F["parameters"])
    spec = {"type": "function", "function": F}
    for given_as in (F, {**F, "type": "function"}, spec, {"function": F}, tool):
        assert parse_tools([given_as]) == (tool,)
    assert tool.spec() == spec
    assert parse_tools(None) == parse_tools([]) == ()


def test_what_is_left_out_of_a_tool_is_empty() -> None:
    (tool,) = parse_tools([{"name": "now", "description": None, "parameters": None}])
    parameters = {"type": "object", "properties": {}}
    assert tool == Tool("now", "", parameters, strict=False)
    assert tool.spec() == {
        "type": "function",
        "function": {"name": "now", "parameters": parameters},
    }
    assert parse_tools([{"name": "now", "strict": True}])[0].strict


@pytest.mark.parametrize(
    ("tools", "where"),
    [
        ("f", "tools: str, expected a list"),
        (F, "tools: dict, expected a list"),
        ([F, 5], "tools[1]: int, expected a tool"),
        ([F, F], "tools[1]: name 'f' is that of tools[0] too"),
        ([{**F, "type": "web_search"}], "tools[0].type: 'web_search', expected \"function\""),
        ([{"type": "function", "function": 5}], "tools[0].function: int"),
        ([{"type": "function"}], "tools[0].name: None, expected a string"),
        ([{"function": F, "strict": True}], "tools[0].strict: unknown"),
        ([{"function": {"name": 5}}], "tools[0].function.name: 5, expected a string"),
        ([{"name": ""}], "tools[0].name: ''"),
        ([{"name": "a b"}], "tools[0].name: 'a b'"),
        ([{"name": "a\n"}], "tools[0].name"),
        ([{"name": "a>"}], "tools[0].name"),
        ([{"name": "a" * 65}], "tools[0].name"),
        ([{**F, "description": 5}], "tools[0].description: 5"),
        ([{**F, "paramters": {}}], "tools[0].paramters: unknown"),
        ([{**F, "strict": "yes"}], "tools[0].strict: 'yes'"),
        ([{**F, "parameters": []}], "tools[0].parameters: list"),
        ([{**F, "parameters": {"type": "array"}}], "tools[0].parameters.type: 'array'"),
        ([{**F, "parameters": {"properties": []}}], "tools[0].parameters.properties: list"),
        ([{**F, "parameters": {"properties": {"a": 5}}}], "tools[0].parameters.properties.a: int"),
        ([{**F, "parameters": {"required": "a"}}], "tools[0].parameters.required: 'a'"),
        ([{**F, "parameters": {"default": {1}}}], "tools[0].parameters: is not JSON"),
        ([{**F, "parameters": {"title": "\ud83d"}}], "tools[0].parameters: is not JSON"),
        ([Tool("a b")], "tools[0].name: 'a b'"),
        ([lambda x: x], "tools[0]: <lambda>.name"),
    ],
)
def test_a_refusal_says_where(tools: Any, where: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_tools(tools)
    assert str(caught.value).startswith(where)


# Choice


def test_tool_choice_has_a_normal_form() -> None:
    tools = parse_tools([F, {"name": "auto"}])
    assert check_tool_choice(None, tools) == check_tool_choice("auto", tools) == ToolChoice("auto")
    assert check_tool_choice(None, ()) == check_tool_choice("none", tools) == ToolChoice("none")
    assert check_tool_choice("required", tools) == ToolChoice("required")
    named = ToolChoice("required", "f")
    for choice in ("f", {"type": "function", "function": {"name": "f"}}, named):
        assert check_tool_choice(choice, tools) == named
    by_form = check_tool_choice({"type": "function", "function": {"name": "auto"}}, tools)
    assert by_form == ToolChoice("required", "auto")
    assert check_tool_choice(by_form, tools) == by_form


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        ("g", "tool_choice: 'g', expected the name of a tool: 'f'"),
        (5, "tool_choice: 5"),
        ({"type": "allowed_tools"}, "tool_choice.type: 'allowed_tools'"),
        ({"type": "function"}, "tool_choice.function: NoneType"),
        ({"type": "function", "function": {"name": "g"}}, "tool_choice.function.name: 'g'"),
        ({"type": "function", "function": {}}, "tool_choice.function.name: None"),
        ([], "tool_choice: []"),
    ],
)
def test_a_wrong_choice_is_named(choice: Any, where: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_tool_choice(choice, parse_tools([F]))
    assert str(caught.value).startswith(where)
    for required in ("required", "f"):
        with pytest.raises(ValueError, match="tool_choice: .*no tools"):
            check_tool_choice(required, ())


# Functions


def test_a_function_says_all_about_its_tool() -> None:
    tool = function_tool(weather)
    assert (tool.name, tool.description) == ("weather", "Look up the weather.\n\nUses no network.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "height": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                },
                "required": ["name"],
                "description": "where; a name with more to it.",
            },
            "unit": {
                "type": "string",
                "enum": ["celsius", "kelvin"],
                "description": "of the temperatures.",
                "default": "kelvin",
            },
            "days": {"type": "integer", "description": "how many", "default": 1},
            "mode": {
                "anyOf": [{"type": "string", "enum": ["fast", "exact"]}, {"type": "null"}],
                "default": None,
            },
            "extra": {"default": None},
        },
        "required": ["place"],
    }
    assert parse_tools([weather]) == (tool,)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (object, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Sequence[float], {"type": "array", "items": {"type": "number"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (
            Options,
            {
                "type": "object",
                "properties": {
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                },
                "required": ["days"],
            },
        ),
    ],
)
def test_type_hints_become_schemas(hint: Any, schema: dict[str, Any]) -> None:
    def function(x) -> None: ...  # type: ignore[no-untyped-def]

    function.__annotations__ = {"x": hint}
    assert function_tool(function).parameters["properties"] == {"x": schema}


def positional(x: int, /) -> None: ...
def raw(x: bytes) -> None: ...
def keyed(x: dict[int, str]) -> None: ...
def linked(x: Node) -> None: ...
def lost(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (positional, "positional: parameter x: cannot be given by name"),
        (raw, "raw: parameter x: bytes has no JSON form"),
        (keyed, "keyed: parameter x: .* expected a dict with str keys"),
        (linked, r"linked: parameter x.next: Node contains itself"),
        (lost, "lost: its signature cannot be read: .*Missing"),
    ],
)
def test_what_json_cannot_say_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        function_tool(function)
    with pytest.raises(ValueError, match=rf"^tools\[0\]: {reason}"):
        parse_tools([function])


def test_arguments_become_what_the_hints_say() -> None:
    place = {"name": "Ulm", "height": 478, "tags": ["b", "a", "a"]}
    given = {"place": place, "unit": "celsius", "days": 2.0, "mode": "fast", "extra": [1]}
    assert call_function(weather, given) == "Ulm 478.0 ['a', 'b'] CELSIUS 2 fast [1]"
    assert call_function(weather, {"place": {"name": "Ulm"}}) == "Ulm 0.0 [] KELVIN 1 None None"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "error: place: missing"),
        ({"plaec": 1}, "error: plaec: unknown, expected place, unit, days, mode, extra"),
        ({"place": "Ulm"}, 'error: place: "Ulm", expected an object'),
        ({"place": {"name": 5}}, "error: place.name: 5, expected a string"),
        ({"place": {}}, "error: place.name: missing"),
        ({"place": {"name": "", "x": 1}}, "error: place.x: unknown, expected name, height, tags"),
        ({"place": {"name": "", "tags": [1]}}, "error: place.tags[0]: 1, expected a string"),
        (
            {"place": {"name": ""}, "unit": "K"},
            'error: unit: "K", expected one of "celsius", "kelvin"',
        ),
        ({"place": {"name": ""}, "days": True}, "error: days: true, expected an integer"),
        (
            {"place": {"name": ""}, "mode": 1},
            'error: mode: 1, expected one of "fast", "exact"; or 1, expected null',
        ),
    ],
)
def test_wrong_arguments_are_told_to_the_model(arguments: dict[str, Any], text: str) -> None:
    assert call_function(weather, arguments) == text


def test_results_and_failures_become_text() -> None:
    def give(x: int) -> Any:
        results = ["é", {"é": Place("Ulm"), "unit": Unit.KELVIN}, None, {1}, object]
        return results[x]

    assert call_function(give, {"x": 0}) == "é"
    plain = {"é": {"name": "Ulm", "height": 0.0, "tags": []}, "unit": "kelvin"}
    assert json.loads(call_function(give, {"x": 1})) == plain
    assert call_function(give, {"x": 2}) == "null"
    assert call_function(give, {"x": 3}) == "[1]"
    assert call_function(give, {"x": 9}) == "error: IndexError: list index out of range"

    async def later() -> None: ...

    with pytest.raises(ValueError, match="later: is asynchronous"):
        call_function(later, {})


# Types of arguments

SCHEMA = {
    "type": "object",
    "properties": {
        "plain": {"type": "integer"},
        "list": {"type": ["string", "null"]},
        "enum": {"enum": ["a", 1]},
        "const": {"const": True},
        "any": {"description": "whatever"},
        "yes": True,
        "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a~1b"}]},
        "both": {"allOf": [{"type": ["string", "number"]}, {"type": ["number", "array"]}]},
        "never": {"allOf": [{"type": "string"}, {"type": "array"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "#/$defs/none"},
        "far": {"$ref": "https://example.com/schema"},
        "object": {"properties": {}},
        "array": {"items": {}},
    },
    "additionalProperties": {"type": "boolean"},
    "$defs": {"a/b": {"type": "array"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("plain", "integer"),
        ("list", "string null"),
        ("enum", "string integer"),
        ("const", "boolean"),
        ("any", " ".join(sorted(ANY))),
        ("yes", " ".join(sorted(ANY))),
        ("either", "string array"),
        ("both", "number integer"),
        ("never", " ".join(sorted(ANY))),
        ("loop", " ".join(sorted(ANY))),
        ("lost", " ".join(sorted(ANY))),
        ("far", " ".join(sorted(ANY))),
        ("object", "object"),
        ("array", "array"),
        ("other", "boolean"),
    ],
)
def test_the_schema_tells_the_types_of_an_argument(key: str, types: str) -> None:
    assert argument_types(SCHEMA, key) == set(types.split())


def test_parameters_may_stand_behind_references_and_alternatives() -> None:
    part = {"properties": {"x": {"type": "integer"}}}
    other = {"properties": {"x": {"type": "null"}}}
    assert argument_types({"allOf": [part]}, "x") == {"integer"}
    assert argument_types({"oneOf": [part, other]}, "x") == {"integer", "null"}
    assert argument_types({"$ref": "#/$defs/p", "$defs": {"p": part}}, "x") == {"integer"}
    assert argument_types({"anyOf": [part, {}]}, "x") == ANY
    assert argument_types({}, "x") == ANY


def test_a_schema_of_many_references_takes_no_time() -> None:
    twice = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(100)}
    twice["100"] = {"type": "integer"}
    schema = {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": twice}
    assert argument_types(schema, "x") == {"integer"}
    objects = {name: part for name, part in twice.items() if name != "100"}
    objects["100"] = {"properties": {"x": {"type": "integer"}}}
    assert argument_types({"$ref": "#/$defs/0", "$defs": objects}, "x") == {"integer"}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100_000):
        deep = {"anyOf": [deep]}
    assert argument_types({"properties": {"x": deep}}, "x") == ANY


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda s: st.lists(s | st.text(), max_size=3) | st.dictionaries(st.text(), s, max_size=3),
)


@given(json_values)
def test_json_of_the_type_is_read_as_the_value(value: Any) -> None:
    for types in (
        ANY,
        {type_name(value)},
        {type_name(value), "string"},
        {type_name(value), "null"},
    ):
        assert parse_value(json.dumps(value), frozenset(types)) == value


@given(st.text(), st.sets(st.sampled_from(sorted(ANY)), min_size=1))
def test_any_text_is_a_value_and_valid_json(text: str, types: set[str]) -> None:
    value = parse_value(text, frozenset(types))
    json.dumps(value, allow_nan=False)
    assert value == text or type_name(value) in types
