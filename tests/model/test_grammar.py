"""Structured output: what comes out is what the format asks for, whatever the model would say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily
from lily.grammar import Format, compile_format, tool_call_grammar

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"
PROMPT = "He looked at the letter and said:"
FEW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def demo() -> Iterator[lily.Model]:
    with lily.Model.load(CHECKPOINT) as model:
        yield model


def written(model: lily.Model, format: Format, n: int = 120, **options: Any) -> lily.Result:
    return model.generate(PROMPT, format=format, max_tokens=n, **options).result()


NAMES = st.text('abcdefgxyz_- é"', min_size=1, max_size=6)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 30}),
    st.integers(0, 9).map(lambda n: {"type": "string", "maxLength": n}),
    st.just({"type": "string", "pattern": "^[a-c]{2}$"}),
    st.lists(NAMES, min_size=1, max_size=3, unique=True).map(lambda some: {"enum": some}),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner)
    objects = st.builds(
        lambda properties, n: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:n],
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.integers(0, 3),
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1).map(lambda s: {"anyOf": s}))


@FEW
@given(
    schema=st.recursive(LEAVES, nested, max_leaves=4),
    temperature=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_a_text_that_ended_is_valid_under_its_schema(
    demo: lily.Model, schema: dict[str, Any], temperature: float, seed: int
) -> None:
    result = written(demo, schema, temperature=temperature, seed=seed)
    if result.finish_reason == "stop":
        jsonschema.validate(json.loads(result.text), schema)
    else:
        assert result.finish_reason == "length"
        assert len(result.tokens) == 120


def test_keys_that_are_not_allowed_never_occur(demo: lily.Model) -> None:
    schema = {
        "type": "object",
        "properties": {"to": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2, 3]}},
        "required": ["to", "n"],
        "additionalProperties": False,
    }
    texts = set()
    for seed in range(4):
        result = written(demo, schema, seed=seed, temperature=1)
        assert result.finish_reason == "stop"
        assert json.loads(result.text).keys() == {"to", "n"}
        texts.add(result.text)
    assert len(texts) > 1


def test_json_is_any_object(demo: lily.Model) -> None:
    bias = {demo.encode("}")[0]: 8.0}  # lest it goes on for long
    ended = 0
    for seed in range(6):
        result = written(demo, "json", 60, seed=seed, temperature=1, logit_bias=bias)
        assert result.text.startswith("{")
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)
            ended += 1
    assert ended


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5}])
def test_a_regular_expression_matches_the_whole_text(
    demo: lily.Model, options: dict[str, Any]
) -> None:
    pattern = r"[A-Z][a-z]{2,8} \d{4}-\d\d (oui|non)"
    result = written(demo, lily.Regex(pattern), **options)
    assert re.fullmatch(pattern, result.text)
    assert result.finish_reason == "stop"
    assert result.tokens[-1] not in demo.stop_ids  # nothing else could follow: no step for it


def test_the_model_ends_a_text_that_could_go_on(demo: lily.Model) -> None:
    """Where the expression allows the end and more, the end is the model's choice."""
    result = written(demo, lily.Regex(r"a+"), logit_bias=dict.fromkeys(demo.stop_ids, 100.0))
    assert (result.text, result.finish_reason) == ("a", "stop")
    assert result.tokens[-1] in demo.stop_ids
    result = written(demo, lily.Regex(r"a+"), 9, logit_bias=dict.fromkeys(demo.stop_ids, -100.0))
    assert (set(result.text), result.finish_reason, len(result.tokens)) == ({"a"}, "length", 9)


def test_a_grammar_may_name_special_tokens(demo: lily.Model) -> None:
    result = written(demo, lily.Grammar('start: "ab" </think> ("c" | "d")'), seed=1)
    assert result.text in ("ab</think>c", "ab</think>d")
    assert demo.tokenizer.added_tokens["</think>"] in result.tokens
    with pytest.raises(ValueError, match="format: grammar: .*<nothing>"):
        written(demo, lily.Grammar("start: <nothing>"))


def test_tags_and_control_tokens_are_no_text(demo: lily.Model) -> None:
    for format in (lily.Regex("(?s:.*)"), {"type": "string"}):
        constraint = compile_format(format, demo.tokenizer)
        if not isinstance(format, lily.Regex):
            constraint.accept(demo.encode('"')[0])
        bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
        allowed = {int(id) for id in np.flatnonzero(bits)}
        assert allowed & set(demo.tokenizer.added_tokens.values()) <= demo.stop_ids
        assert len(allowed) > 1000


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({"type": "array", "uniqueItems": True}, 'schema: .*not supported: .*"uniqueItems"'),
        ({"type": "object", "properties": {"a": {"not": {}}}}, 'not supported: .*"not"'),
        ({"$ref": "#/$defs/none"}, "schema: .*none"),
        ({"type": "zebra"}, "zebra"),
        ({"type": "string", "format": "zebra"}, "zebra"),
        ({"enum": [object()]}, "schema: .*JSON"),
        (lily.Regex("a(b"), "regex: .*unclosed group"),
        (lily.Regex("a(?=b)"), "regex: .*look-ahead"),
        (lily.Grammar("start: other"), 'grammar: .*"other"'),
        (lily.Grammar(3), "grammar: 3, expected a string"),  # type: ignore[arg-type]
        ("xml", "'xml', expected a JSON schema"),
        (True, "True, expected a JSON schema"),
    ],
)
def test_a_format_that_cannot_be_kept_is_refused_at_once(
    demo: lily.Model, format: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^format: .*{message}|^format: {message}"):
        demo.generate(PROMPT, format=format)


def test_without_the_package_the_error_says_how_to_get_it(
    demo: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(lily.Error, match=r"llguidance.*\nhint: pip install 'lily\[grammar\]'"):
        demo.generate(PROMPT, format="json")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", 'a "b"']},
                    "days": {"type": "integer", "minimum": 1, "maximum": 20},
                    "where": {"$ref": "#/$defs/point"},
                },
                "required": ["city", "where"],
                "$defs": {
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "boolean"}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"name": "now"},
]
CALL = re.compile(
    r"<tool_call>\n<function=(weather)>\n<parameter=city>\n(Paris|a \"b\")\n</parameter>\n"
    r"(?:<parameter=days>\n(\d+)\n</parameter>\n)?"
    r"<parameter=where>\n(\{\s*\"x\"\s*:\s*(?:true|false)\s*\})\n</parameter>\n</function>\n</tool_call>"
    r"|<tool_call>\n<function=now>\n</function>\n</tool_call>"
)


def test_required_calls_are_calls_with_typed_values(demo: lily.Model) -> None:
    grammar = tool_call_grammar(TOOLS, demo.tokenizer)
    names = set()
    for seed in range(4):
        result = written(demo, grammar, 200, seed=seed, temperature=2)
        for text in re.findall(r"<tool_call>.*?</tool_call>", result.text, re.S):
            call = CALL.fullmatch(text)
            assert call, text
            names.add(call[1])
            assert 1 <= int(call[3] or 1) <= 20
    assert names


def test_text_parameters_are_bare_and_end_at_the_closing_tag(demo: lily.Model) -> None:
    properties = {"a": {"type": ["string", "null"]}, "b": {}, "c": {"anyOf": [{"type": "null"}]}}
    tools = [{"name": 'say "x"', "parameters": {"properties": properties, "required": ["a", "c"]}}]
    constraint = compile_format(tool_call_grammar(tools), demo.tokenizer)
    call = (
        '<tool_call>\n<function=say "x">\n'
        '<parameter=a>\nany\n\n"text" </parameter> {\n</parameter>\n'
        "<parameter=c>\nnull\n</parameter>\n</function>\n</tool_call>"
    )
    for token in demo.encode(f"{call}\n{call}", special=True):
        constraint.accept(token)
    with pytest.raises(ValueError, match="does not allow"):
        constraint.accept(demo.encode("x")[0])
    assert not constraint.finished  # another call may follow


def test_parameters_have_the_types_of_their_schema(demo: lily.Model) -> None:
    properties = {
        "unit": {"$ref": "#/$defs/Unit"},
        "point": {"properties": {"x": {"type": "integer"}}},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tree": {"$ref": "#/$defs/Tree"},
    }
    definitions = {
        "Unit": {"enum": ["C", "F", 3]},
        "Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
    }
    parameters = {"properties": properties, "required": ["extra"], "$defs": definitions}
    grammar = tool_call_grammar([{"name": "f", "parameters": parameters}], demo.tokenizer)

    def allowed(key: str, value: str) -> bool:
        constraint = compile_format(grammar, demo.tokenizer)
        more = "" if key == "extra" else "<parameter=extra>\nany\n</parameter>\n"
        given = f"<parameter={key}>\n{value}\n</parameter>\n{more}"
        text = f"<tool_call>\n<function=f>\n{given}</function>\n</tool_call>"
        try:
            for token in demo.encode(text, special=True):
                constraint.accept(token)
        except ValueError:
            return False
        return True

    assert all(allowed("unit", value) for value in ("C", "F", "3"))
    assert not any(allowed("unit", value) for value in ("K", '"C"', ""))
    assert allowed("point", '{"x": 3}')
    assert not any(allowed("point", value) for value in ('"text"', "3", '{"x": "a"}'))
    assert allowed("n", "12") and allowed("n", "null") and not allowed("n", "twelve")
    assert allowed("tree", "[[], [[]]]") and not allowed("tree", "[1]")
    assert allowed("extra", "what\never")


def test_tags_are_spelled_where_they_are_no_tokens(tiny: lily.Model) -> None:
    tokenizer = tiny.tokenizer
    grammar = tool_call_grammar([{"name": "now"}], tokenizer)
    constraint = compile_format(grammar, tokenizer)
    for token in tokenizer.encode(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>", special=True
    ):
        constraint.accept(token)


def test_tools_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="tools: found none"):
        tool_call_grammar([])
    with pytest.raises(ValueError, match=r"tools\[1\]\.name: None"):
        tool_call_grammar([{"name": "a"}, {"function": {}}])
