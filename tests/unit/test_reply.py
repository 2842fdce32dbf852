"""Replies taken apart: reasoning, content and calls, however the text comes in pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily.reply
from lily.chat import ChatTemplate
from lily.reply import Part, ReplyParser, ToolCall
from lily.stops import StopStrings
from lily.tools import parse_tools

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "unit": {"enum": ["celsius", "kelvin"]},
    "i": {"type": "integer"},
    "f": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "integer"}},
    "o": {"type": "object"},
    "n": {"type": "null"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "flag": {"type": ["boolean", "null"]},
    "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "ref": {"$ref": "#/$defs/count"},
}
TOOLS = parse_tools(
    [
        {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "$defs": {"count": {"type": "integer"}},
            },
        },
        {"name": "now"},
    ]
)


def call(*arguments: tuple[str, str], name: str = "f") -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CUT = "<tool_call>\n<function=f>\n<parameter=s>\na"
OPEN = "<tool_call>\n<function=f>\n</function>\n"


class Read:
    """A reply read to its end, and what its parts join to."""

    def __init__(self, pieces: list[str], thinking: bool = False, **options: Any) -> None:
        self.parser = ReplyParser(thinking=thinking, **{"tools": TOOLS, **options})
        self.steps = [self.parser.push(piece) for piece in pieces]
        self.steps.append(self.parser.finish())
        self.parts = [part for step in self.steps for part in step]
        self.reasoning = "".join(part.reasoning for part in self.parts)
        self.content = "".join(part.content for part in self.parts)
        self.streamed: dict[tuple[int, str, str], str] = {}
        for part in self.parts:
            if (piece := part.call) is not None:
                key = (piece.index, piece.id, piece.name)
                assert piece.arguments or key not in self.streamed
                self.streamed[key] = self.streamed.get(key, "") + piece.arguments
        self.calls = self.parser.calls
        assert (self.reasoning, self.content) == (self.parser.reasoning, self.parser.content)
        assert [index for index, _, _ in self.streamed] == list(range(len(self.streamed)))
        for done, ((_, id, name), arguments) in zip(
            self.calls, self.streamed.items(), strict=False
        ):
            assert done == ToolCall(id, name, json.loads(arguments), arguments)
            assert done.arguments_json == arguments

    @property
    def said(self) -> tuple[Any, ...]:
        """Everything but the random ids."""
        return (
            self.reasoning,
            self.content,
            self.parser.stop,
            [(name, text) for (_, _, name), text in self.streamed.items()],
            [(done.name, done.arguments) for done in self.calls],
        )


def read(text: str, thinking: bool = False, **options: Any) -> Read:
    return Read([text], thinking, **options)


def arguments(text: str, **options: Any) -> dict[str, Any]:
    (done,) = read(text, **options).calls
    return done.arguments


# Pieces

fragments = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=g>"),
        *("<function=", "<parameter=", "<parameter=s>", "<parameter=i>", "<parameter=maybe>"),
        *(
            "</parameter>",
            "\n</parameter>\n",
            "</function>",
            "\n",
            "\n\n",
            " ",
            ">",
            "<",
            "</",
            "#",
        ),
        *("text", "5", "nu", "null", "##END", "END", call(), call(("s", "a b"), ("i", "7"))),
        *(call(("l", "[1, 2]"), name="g"), "\\", '"', "é", "👩‍👩‍👧"),
    ]
)
replies = st.lists(fragments, max_size=14).map("".join)


@given(replies, st.booleans(), st.data())
def test_the_cut_into_pieces_changes_nothing(
    text: str, thinking: bool, data: st.DataObject
) -> None:
    options = {"stop": data.draw(st.sampled_from([(), ("##END",), ("\n\n", "5")]))}
    whole = read(text, thinking, **options)
    assert Read(list(text), thinking, **options).said == whole.said
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert Read(pieces, thinking, **options).said == whole.said


@given(replies, st.booleans())
def test_without_tools_every_other_tag_is_text(text: str, thinking: bool) -> None:
    got = Read(list(text), thinking, tools=())
    begun = text.lstrip()
    inside = thinking or begun.startswith("<think>")
    text = begun.removeprefix("<think>") if begun.startswith("<think>") else text
    thought, closed, rest = text.partition("</think>") if inside else ("", "", text)
    assert got.reasoning == (thought.rstrip() if closed else thought).lstrip("\n")
    assert got.content == rest.lstrip("\n")
    assert not got.streamed


@given(replies, st.booleans())
def test_nothing_certain_is_held_back(text: str, thinking: bool) -> None:
    """After each character, what was not yet said is blank or may still be a tag."""
    got = Read(list(text), thinking, tools=())
    for end in range(1, len(text) + 1):
        said = "".join(p.reasoning + p.content for step in got.steps[:end] for p in step)
        held = re.sub(r"</?think>|\s", "", text[:end])[len(re.sub(r"\s", "", said)) :]
        assert any(tag.startswith(held) for tag in ("<think>", "</think>"))


def test_strings_come_as_they_are_written() -> None:
    parser = ReplyParser(thinking=False, tools=TOOLS)
    got = [
        parser.push(piece)
        for piece in ["<tool_call>\n<function=f>\n<parameter=s>\n", "one", " two"]
    ]
    pieces = [part.call.arguments for step in got for part in step if part.call]
    assert pieces == ["", '"one', " two"] or "".join(pieces) == '{"s": "one two'
    assert [p.call.arguments for p in got[2] if p.call] == [" two"]
    assert parser.calls == ()


# Thinking


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (False, "plain", "", "plain"),
        (False, "a <think> b", "", "a <think> b"),
        (False, "\n<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (False, "<thin", "", "<thin"),
        (False, "\n\nyes\n", "", "yes\n"),
        (False, "", "", ""),
        (True, "hm</think>yes", "hm", "yes"),
        (True, "<think>\nhm</think>yes", "hm", "yes"),
        (True, "</think>yes", "", "yes"),
        (True, "hm </think", "hm </think", ""),
        (True, "hm", "hm", ""),
        (True, "a <b> c</think>d</think>e", "a <b> c", "d</think>e"),
        (True, 'a {"b": 1} <tool_call>\n</think>c', 'a {"b": 1} <tool_call>', "c"),
        (True, f"{call()} or so\n</think>\n\nno", f"{call()} or so", "no"),
        (True, f"{call()}\n</think>\n\nno", call(), "no"),
        (True, f"{call()}{call(name='g')}", f"{call()}{call(name='g')}", ""),
        (True, f"a\n{call()} b", f"a\n{call()} b", ""),
        (True, call()[:-3], call()[:-3], ""),
        (True, "<tool_call>\n<function=f>\n</think>c", "<tool_call>\n<function=f>", "c"),
        (True, f"{CUT}</tool_call>", f"{CUT}</tool_call>", ""),
        (True, f"{OPEN}{call(name='g')}", f"{OPEN}{call(name='g')}", ""),
    ],
)
def test_thinking_is_told_from_the_answer(
    thinking: bool, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        got = Read(pieces, thinking)
        assert (got.reasoning, got.content, got.calls) == (reasoning, content, ())
        assert not got.streamed


def test_only_what_may_be_a_call_is_held_back() -> None:
    assert ReplyParser(thinking=False).push("a \n") == [Part(content="a \n")]
    assert ReplyParser(thinking=False, tools=TOOLS).push("a \n") == [Part(content="a")]
    parser = ReplyParser(thinking=False, tools=TOOLS, stop="##END")
    assert parser.push("a \n##END") == [Part(content="a \n")]
    parser = ReplyParser(thinking=True, tools=TOOLS)
    assert parser.push("<tool_call>\n<function=g>") == [Part(reasoning="<tool_call>\n<function=g>")]
    assert parser.push("<tool_call>\n<function=f>") == []


def test_says_whether_it_is_thinking() -> None:
    parser = ReplyParser(thinking=False)
    assert not parser.in_thinking
    parser.push("<think>a")
    assert parser.in_thinking
    parser.push("</think>")
    assert not parser.in_thinking
    assert ReplyParser(thinking=True).in_thinking


def test_calls_that_end_unclosed_thinking_count() -> None:
    text = f"I will look.\n\n{call(('i', '5'))}\n{call(name='now')}\n"
    for pieces in ([text], list(text)):
        got = Read(pieces, thinking=True)
        assert (got.reasoning, got.content) == ("I will look.", "")
        assert [(c.name, c.arguments) for c in got.calls] == [("f", {"i": 5}), ("now", {})]


def test_a_call_that_the_cap_cuts_off_within_thinking_is_a_draft() -> None:
    parser = ReplyParser(thinking=True, tools=TOOLS)
    parts = [*parser.push(f"I will look.\n\n{call(('i', '5'))}"), *parser.finish(cut=True)]
    assert parser.calls == ()
    assert "".join(part.reasoning for part in parts).startswith("I will look.\n\n<tool_call>")


# Calls


def test_two_calls_keep_order_and_have_ids_of_their_own() -> None:
    got = read(f"hm\n</think>\n\nLet me see.\n\n{call(('i', '5'))}\n{call(name='now')}\n", True)
    assert (got.reasoning, got.content) == ("hm", "Let me see.")
    assert [(c.name, c.arguments_json) for c in got.calls] == [("f", '{"i": 5}'), ("now", "{}")]
    ids = {c.id for c in got.calls}
    assert len(ids) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "5", "5"),
        ("s", "null", "null"),
        ("s", "", ""),
        ("s", " a\n\n b\n", " a\n\n b\n"),
        ("s", 'say "hi" \\ </parameter> <parameter=i>', 'say "hi" \\ </parameter> <parameter=i>'),
        ("s", "</function>\n</tool_call>", "</function>\n</tool_call>"),
        ("s", "a\n</parameter>\nb", "a\n</parameter>\nb"),
        ("s", "a\n</parameter>\n</parameter>", "a\n</parameter>\n</parameter>"),
        ("s", "</parameter>", "</parameter>"),
        ("unit", "kelvin", "kelvin"),
        ("i", "5", 5),
        ("i", "-5.0", -5),
        ("i", "5.5", "5.5"),
        ("i", "five", "five"),
        ("i", "true", "true"),
        ("i", "1" * 5000, "1" * 5000),
        ("i", '"5"', '"5"'),
        ("f", "5", 5),
        ("f", "1e3", 1000.0),
        ("f", "1e999", "1e999"),
        ("f", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "yes", "yes"),
        ("l", "[1, 2]", [1, 2]),
        ("l", "[1, 2", "[1, 2"),
        ("l", "\n[\n1\n]\n", [1]),
        ("l", "[" * 100_000, "[" * 100_000),
        ("o", '{"a": [null]}', {"a": [None]}),
        ("o", '{"a": NaN}', '{"a": NaN}'),
        ("o", '{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ("n", "null", None),
        ("maybe", "null", None),
        ("maybe", "nul", "nul"),
        ("maybe", "nullable", "nullable"),
        ("maybe", "5", "5"),
        ("flag", "null", None),
        ("flag", "true", True),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("ref", "5", 5),
        ("unknown", "5", 5),
        ("unknown", '"5"', '"5"'),
        ("unknown", "five", "five"),
    ],
)
def test_values_have_the_schemas_types(key: str, text: str, value: object) -> None:
    for pieces in ([call((key, text))], list(call((key, text)))):
        (done,) = Read(pieces).calls
        assert done.arguments == {key: value}
        assert type(done.arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<parameter=s>a</parameter><parameter=i>5</parameter></function>", {"s": "a", "i": 5}),
        ("<parameter=s>a\nb\n</parameter>\n</function>", {"s": "a\nb"}),
        ("<parameter=s></parameter></function>", {"s": ""}),
        ("<parameter=s>\n</parameter>\n</function>", {"s": ""}),
        ("<parameter=s>\na</parameter>\n\n</parameter>\n</function>", {"s": "a</parameter>\n"}),
        ("<parameter=s>a</parameter></parameter></function>", {"s": "a</parameter>"}),
        (
            "<parameter=s>\na\n</parameter></parameter>\n</function>\n</parameter>\n</function>",
            {"s": "a\n</parameter></parameter>\n</function>"},
        ),
        ("<parameter=i>\n5\n</parameter>\n", {"i": 5}),
        ("<parameter=i>\n5\n</parameter>\nso\n</function>", None),
        ("so <parameter=i>\n5\n</parameter>\n</function>", {"i": 5}),
        ("<parameter=i\n5\n</parameter>\n</function>", {}),
        ("<parameter=i>\n5\n</parameter>\n" * 2 + "</function>", {"i": 5}),
        (
            "".join(f"<parameter=s>\n{s}\n</parameter>\n" for s in "ab") + "</function>",
            {"s": "a"},
        ),
    ],
)
def test_forms_near_the_templates_are_understood(body: str, expected: object) -> None:
    text = f"<tool_call>\n<function=f>\n{body}\n</tool_call>"
    for pieces in ([text], list(text)):
        calls = Read(pieces).calls
        assert [done.arguments for done in calls] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call> is a tag",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call><function=>",
        "<tool_call><function=\n>",
        "<tool_call><function=f\n>",
        "<tool_call><function=f<tool_call>",
        "<tool_call> <tool_call>\n<function f>",
        "</tool_call> <function=f></function>",
        "half a tag: <tool_c",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    got = Read(list(text + "."))
    assert got.content == text + "."
    assert not got.streamed


def test_a_call_of_an_unknown_function_is_kept() -> None:
    (done,) = read(call(("a", "5"), ("b", "x"), name="nobody")).calls
    assert (done.name, done.arguments) == ("nobody", {"a": 5, "b": "x"})


def test_content_goes_on_behind_a_call() -> None:
    got = read(f"one\n{call(name='now')}\ntwo")
    assert got.content == "one\ntwo"
    assert len(got.calls) == 1


def test_a_cut_call_is_never_complete() -> None:
    text = "Well.\n\n" + call(("s", "a </function> b"), ("i", "5"), ("maybe", "null"))
    done = text.rindex("</function>") + len("</function>")
    for end in range(len(text) + 1):
        got = Read([text[:end]])
        assert len(got.calls) == (end >= done)
        assert got.content in "Well.\n\n<tool_call"
        assert "<function" not in got.content
        for pieces in got.streamed.values():
            assert read(text).calls[0].arguments_json.startswith(pieces)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s, max_size=3),
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | replies
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = {
    "s": texts,
    "unit": st.sampled_from(["celsius", "kelvin"]),
    "i": st.integers(),
    "f": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "b": st.booleans(),
    "l": st.lists(st.integers(), max_size=3),
    "o": st.dictionaries(texts, nested(plain | texts), max_size=3),
    "n": st.none(),
    "maybe": st.none() | texts.filter(lambda text: text not in ("null", "None")),
    "flag": st.none() | st.booleans(),
    "either": st.integers() | st.sampled_from(["a", "five", ""]),
    "ref": st.integers(),
}
ENDS = re.compile(r"\n</parameter>\s*(<parameter=|</function>|</tool_call>)")


@given(
    st.lists(st.fixed_dictionaries({}, optional=values), min_size=1, max_size=3),
    st.sampled_from(["", "hm", "a <b>"]),
    st.sampled_from(["", "Let me see."]),
)
def test_what_the_template_writes_is_read_back(
    given: list[dict[str, Any]], reasoning: str, content: str
) -> None:
    for one in given:
        for key in [key for key, value in one.items() if isinstance(value, str)]:
            end = ENDS.search(f"\n{one[key]}\n</parameter>\n</function>")
            if end is None or end.start() <= len(one[key]):
                del one[key]  # the text of a call's end cannot be told from the end
    template = ChatTemplate.load(CHECKPOINT)
    user = {"role": "user", "content": "hi"}
    reply = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [{"function": {"name": "f", "arguments": one}} for one in given],
    }
    specs = [tool.spec() for tool in TOOLS]
    prompt = template.render([user], tools=specs)
    full = template.render([user, reply], tools=specs, add_generation_prompt=False)
    assert full.startswith(prompt)
    text = full.removeprefix(prompt).removesuffix("<|im_end|>\n")
    got = Read([text], thinking=True)
    assert (got.reasoning, got.content) == (reasoning, content)
    assert [done.arguments for done in got.calls] == given


# Stop strings


@pytest.mark.parametrize(
    ("text", "content", "stop"),
    [
        ("one ##END two", "one ", "##END"),
        ("one ##EN", "one ##EN", None),
        ("a ##END b</think>\n\none\n##END", "one\n", "##END"),
        (f"one\n{call(('s', '##END'))}", "one", None),
        (f"one ##{call(name='now')}END", "one ##END", None),
        (f"one ##END {call()}", "one ", "##END"),
    ],
)
def test_stop_strings_count_in_content_only(text: str, content: str, stop: str | None) -> None:
    for pieces in ([text], list(text)):
        got = Read(pieces, thinking="</think>" in text, stop=StopStrings(["##END"]))
        assert (got.content, got.parser.stop) == (content, stop)
        assert got.parser.push("more") == []


def test_a_stop_of_newlines_is_not_met_by_those_of_the_tags() -> None:
    got = read("a\n\nb\n</think>\n\none\n\ntwo", True, stop="\n\n")
    assert (got.reasoning, got.content, got.parser.stop) == ("a\n\nb", "one", "\n\n")


def test_after_the_end_nothing_comes() -> None:
    parser = ReplyParser(thinking=False)
    assert parser.push("a<") == [Part(content="a<")]
    assert parser.finish() == []
    assert parser.finish() == parser.push("b") == []


# Work


@pytest.mark.parametrize(
    "unit",
    [
        *("a", " ", "\n", "<", "<tool_call>", "<tool_call>\n<function=", "</think>", "<think>"),
        *(
            call(("s", "b")),
            call(("l", "[1]")),
            "<tool_call><function=f><parameter=s>a</parameter>",
        ),
        *("<parameter=s>", "\n</parameter>", "</parameter>"),
    ],
)
@pytest.mark.parametrize(
    "lead", ["", "<tool_call><function=f><parameter=l>\n", "<tool_call><function=f>"]
)
@pytest.mark.parametrize("thinking", [False, True])
def test_work_grows_with_the_text(
    unit: str, lead: str, thinking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0
    find = lily.reply._Tags.find

    def count(tags: Any, text: str, start: int, ended: bool) -> tuple[int, str]:
        nonlocal looked_at
        end, tag = find(tags, text, start, ended)
        looked_at += end + len(tag) - start + 1
        return end, tag

    monkeypatch.setattr(lily.reply._Tags, "find", count)
    text = lead + unit * (6_000 // len(unit))
    read(text, thinking)
    assert looked_at < 10 * len(text)
    looked_at = 0
    parser = ReplyParser(thinking=thinking, tools=TOOLS)
    for char in text:
        parser.push(char)
        assert len(parser._buffer) - parser._at < 16
    parser.finish()
    assert looked_at < 20 * len(text)
