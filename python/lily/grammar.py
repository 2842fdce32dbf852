"""Structured output: what a text may look like, as masks over the next token.

A format is a JSON schema, "json" for any JSON object, a regular expression, or a grammar. The
package llguidance (extra `grammar`) parses along with the text and says which tokens may follow.

Control tokens and tags such as `<think>` are no text here: a schema or an expression never allows
them. A grammar names them without quotes, `<tool_call>`.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lily.errors import Error
from lily.tool_arguments import resolve, schema_types

if TYPE_CHECKING:
    import llguidance

    from lily.tokenizer import Tokenizer

WHITESPACE = r"[\x20\x09]|\r?\n[\x20\x09]{0,40}"
"""Between the parts of a JSON text: a space, or a line break with the next line's indentation.
Without a bound, a model may write nothing else for ever."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression that the whole text must match.

    Args:
        pattern: in the syntax of Rust's `regex`: no look-around, no back-references. `.` matches no
            line break; `(?s:.)` does.
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A context-free grammar that the whole text must match.

    Args:
        lark: in llguidance's variant of Lark; the rule to begin with is `start`. Names of special
            tokens stand without quotes, as `<tool_call>`.
    """

    lark: str


Format = Mapping[str, Any] | Literal["json"] | Regex | Grammar
"""A JSON schema, any JSON object, an expression, or a grammar."""


class Constraint(Protocol):
    """Says, token by token, how a text may go on."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    def allowed(self) -> NDArray[np.uint32]:
        """Which tokens may be next: bit i % 32 of word i // 32 stands for id i. Ids that end the
        text are allowed where it is complete."""

    def accept(self, token: int) -> None:
        """Go on to after `token`.

        Raises:
            ValueError: it is not allowed.
        """


def compile_format(format: Format, tokenizer: Tokenizer) -> Constraint:
    """A new constraint at the beginning of its text.

    Raises:
        ValueError: the format is of no known kind, not valid, or uses a keyword of JSON Schema
            that is not supported; the message names it.
        Error: llguidance is not installed.
    """
    guidance = _llguidance()
    make = guidance.LLMatcher
    if isinstance(format, Regex):
        kind, grammar = "regex", make.grammar_from_regex(_text("regex", format.pattern))
    elif isinstance(format, Grammar):
        kind, grammar = "grammar", make.grammar_from_lark(_text("grammar", format.lark))
    elif format == "json":
        kind, grammar = "json", _json_grammar(guidance, {"type": "object"})
    elif isinstance(format, Mapping):
        kind, grammar = "schema", _json_grammar(guidance, format)
    else:
        raise ValueError(
            f'format: {format!r}, expected a JSON schema, "json", Regex(…) or Grammar(…)'
        )
    matcher = make(_token_table(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"format: {kind}: {_summary(matcher.get_error())}")
    constraint = _Matcher(matcher)
    try:
        constraint.allowed()
    except Error as error:
        raise ValueError(f"format: {kind}: no text can match it ({error})") from None
    return constraint


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None = None
) -> Grammar:
    """The grammar of one or more calls of `tools`, in the model's own syntax:

        <tool_call>
        <function=NAME>
        <parameter=KEY>
        VALUE
        </parameter>
        </function>
        </tool_call>

    Parameters come in the order of their schema, required ones always. Strings stand as they are;
    other values are JSON that their schema allows.

    Args:
        tools: function tools as in chat requests, or just their `function` parts.
        tokenizer: whose added tokens the tags may be; None takes them to be added tokens.

    Raises:
        ValueError: there is no tool, or one has no name.
    """
    if not tools:
        raise ValueError("tools: found none, expected at least one")
    functions = [tool.get("function", tool) for tool in tools]
    rules: list[str] = []
    for i, function in enumerate(functions):
        rules += _function_rules(f"f{i}", function, f"tools[{i}]")
    names = " | ".join(f"f{i}" for i in range(len(functions)))
    added = tokenizer.added_tokens if tokenizer else ("<tool_call>", "</tool_call>")
    begin, end = (
        tag if tag in added else json.dumps(tag) for tag in ("<tool_call>", "</tool_call>")
    )
    return Grammar(
        "\n".join(
            [
                r'start: call ("\n" call)*',
                rf'call: {begin} "\n" ({names}) "</function>\n" {end}',
                *rules,
                r'text[suffix="\n</parameter>\n"]: /(?s:.*)/',
            ]
        )
        + "\n"
    )


class _Matcher:
    """A constraint by llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> NDArray[np.uint32]:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise Error(f"grammar: {_summary(self._matcher.get_error())}")
        return np.frombuffer(mask, np.dtype("<u4"))

    def accept(self, token: int) -> None:
        if self._matcher.try_consume_tokens([token]) != 1:
            raise ValueError(f"token {token}: the format does not allow it here")


class _TokenTable:
    """What llguidance asks of a tokenizer. It must not keep the `Tokenizer` alive, whose entry in
    the cache would then never go."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        n = tokenizer.n_tokens
        # The end is a token of its own where the tokenizer names none: nothing else may mean it.
        self.eos_token_id = min(tokenizer.stop_ids, default=n)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(id) for id in range(n)]
        self.special_token_ids = [*tokenizer.added_tokens.values()]
        if not tokenizer.stop_ids:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(n)
        self._plain = tokenizer._plain

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._plain.encode(text.decode(), add_special_tokens=False).ids
        return ids


_tables: weakref.WeakKeyDictionary[Tokenizer, llguidance.LLTokenizer] = weakref.WeakKeyDictionary()
_tables_lock = threading.Lock()


def _token_table(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    """llguidance's view of a tokenizer; made once, which takes about a second."""
    guidance = _llguidance()
    with _tables_lock:
        found = _tables.get(tokenizer)
        if found is None:
            table = _TokenTable(tokenizer)
            ends = sorted(tokenizer.stop_ids) or [table.eos_token_id]
            found = guidance.LLTokenizer(guidance.TokenizerWrapper(table), eos_token=ends)
            _tables[tokenizer] = found
        return found


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise Error(
            "format: structured output needs the package llguidance, found none",
            hint="pip install 'lily[grammar]'",
        ) from None
    return llguidance


def _json_grammar(guidance: Any, schema: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"format: schema: {error}") from None
    grammar: str = guidance.LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": WHITESPACE}
    )
    return grammar


def _text(kind: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"format: {kind}: {value!r}, expected a string")
    return value


def _summary(error: str) -> str:
    """A message of llguidance in one line: without excerpts and the parser's state."""
    first, *rest = error.split("\n<state>")[0].strip().splitlines()
    cause = next((line for line in rest if line.startswith("error: ")), "")
    summary = f"{first} {cause.removeprefix('error: ')}".strip()
    return summary.replace("Unimplemented keys", "keywords that are not supported")


def _function_rules(name: str, function: Mapping[str, Any], where: str) -> list[str]:
    """Rules of one function; its calls begin after `<tool_call>`."""
    spelled = function.get("name")
    if not isinstance(spelled, str) or not spelled:
        raise ValueError(f"{where}.name: {spelled!r}, expected a name")
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    properties = dict(schema.get("properties") or {})
    properties |= {key: None for key in required if key not in properties}
    parts, rules = [_literal(f"<function={spelled}>\n")], []
    for i, (key, value) in enumerate(properties.items()):
        rule = f"{name}_{i}"
        parts.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: {_literal(f'<parameter={key}>' + chr(10))} {_value(value, schema)}")
    return [f"{name}: {' '.join(parts)}", *rules]


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A parameter's value with the tag that closes it."""
    closed = _literal("\n</parameter>\n")
    if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
        schema = resolve(ref, root)
    types = schema_types(schema, root)
    if not isinstance(schema, Mapping):
        return "text"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices:
        spelled = (c if isinstance(c, str) else json.dumps(c) for c in choices)
        return f"({' | '.join(map(_literal, spelled))}) {closed}"
    if "string" in types:
        return "text"
    whole = {"type": sorted(types), **schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    for definitions in ("$defs", "definitions"):
        if definitions in root and "$ref" in json.dumps(schema):
            whole.setdefault(definitions, root[definitions])
    return f"%json {json.dumps(whole)} {closed}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
