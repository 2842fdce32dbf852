"""Chat messages to a prompt, by the checkpoint's own template.

The template's special tokens and what people wrote are told apart: `<|im_end|>` in a message is
ten characters of text and ends no turn. See `ChatTemplate.encode_chat`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.errors import CheckpointError
from lily.files import read_json
from lily.tokenizer import CONFIG_FILE, Tokenizer, check_text, special_tokens

if TYPE_CHECKING:
    import jinja2
    from jinja2.runtime import Context

MAX_STEPS = 1_000_000
"""Loop rounds and macro calls that one rendering may take."""

MAX_CHARS = 1 << 26
"""Characters that a template may write, or keep in one variable."""

THINK_TAGS = ("<think>", "</think>")

Message = Mapping[str, Any]


class ChatTemplate:
    """A checkpoint's Jinja template, in a sandbox. Any number of threads may render with it.

    A template is a program from the checkpoint, so it runs without access to Python's internals,
    and its loops, recursion, variables and output are bounded (`MAX_STEPS`, `MAX_CHARS`).

    Args:
        source: the template's text.
        special_tokens: tokens that the template may name, such as `eos_token`.

    Raises:
        CheckpointError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._template = _compile(source)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ChatTemplate:
        """The template of a checkpoint's folder.

        Looks for `chat_template.jinja`, `chat_template.json` and the entry `chat_template` of
        `tokenizer_config.json`, in this order. Of several named templates the default one counts.

        Raises:
            CheckpointError: there is none, or it is invalid.
        """
        base = Path(folder)
        config = read_json(base / CONFIG_FILE) if (base / CONFIG_FILE).is_file() else {}
        for source in _sources(base, config):
            return cls(source, special_tokens(config))
        raise CheckpointError(f"{base}: no chat template, expected chat_template.jinja")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **extra: Any,
    ) -> str:
        """The prompt as text, for reading; encode chats with `encode_chat`.

        A last message from the assistant is a complete turn; it is not continued.

        Args:
            messages: at least one, each with a `role`. `content` is text or a list of text parts,
                which are joined; from the assistant it may be None. Arguments of tool calls are an
                object, or JSON text of one; other text is kept as it is.
            tools: function schemas, as the template expects them.
            add_generation_prompt: open the assistant's turn at the end.
            enable_thinking: None leaves the choice to the template.
            extra: further variables of the template, such as `preserve_thinking`.

        Raises:
            ValueError: there are no messages; one is malformed, holds an image or half a surrogate
                pair; or the template refuses them. The message says where and why.
        """
        variables = _variables(messages, tools, add_generation_prompt, enable_thinking, extra)
        return self._render(variables)

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **extra: Any,
    ) -> list[int]:
        """Token ids of the prompt, where only the template itself writes special tokens.

        Spellings of added tokens in the messages, tools and extra variables become ordinary text.
        While the template runs, each is replaced by one private-use character that occurs nowhere
        in the input; the result is cut at the special tokens that remain, the template's own, and
        each text between them gets its spellings back and is encoded as a whole.

        One exception: think tags in an assistant's `content` that comes without
        `reasoning_content` stay what they are, because the template itself splits the reasoning
        off there, and because they are what the model wrote. A spelling that comes about only
        where the template joins two strings counts as the template's own; the family's templates
        join nothing that way.

        Arguments and errors are those of `render`.
        """
        variables = _variables(messages, tools, add_generation_prompt, enable_thinking, extra)
        protected, spellings = self._protect(tokenizer, variables)
        ids: list[int] = []
        for part in tokenizer.split_added(self._render(protected)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(tokenizer.encode(part.translate(spellings)))
        return ids

    def _protect(
        self, tokenizer: Tokenizer, variables: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """Variables with stand-ins for spellings, and stand-in -> spelling for `str.translate`."""
        used = set(_PRIVATE.findall(self.source))
        _map_text(variables, lambda text: used.update(_PRIVATE.findall(text)))
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        stand_in = dict(zip(tokenizer.added_tokens, free, strict=False))
        if len(stand_in) < len(tokenizer.added_tokens):
            raise ValueError("messages: use nearly all private-use characters of Unicode")

        def hide(text: str, shown: tuple[str, ...] = ()) -> str:
            return tokenizer.added_pattern.sub(
                lambda match: match[0] if match[0] in shown else stand_in[match[0]], text
            )

        protected = _map_text(variables, hide)
        for before, after in zip(variables["messages"], protected["messages"], strict=True):
            reasoned = isinstance(before.get("reasoning_content"), str)
            if before["role"] == "assistant" and not reasoned:
                after["content"] = hide(before["content"], shown=THINK_TAGS)
        return protected, {ord(char): spelling for spelling, char in stand_in.items()}

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                {**self.special_tokens, **variables, _STEPS: iter(range(MAX_STEPS))}
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise ValueError(f"writes more than {MAX_CHARS} characters")
        except Exception as error:  # a template is a program: anything may go wrong in it
            reason = str(error) or type(error).__name__
            raise ValueError(f"chat template: {reason}") from error
        return "".join(pieces)


# Messages


def _variables(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    enable_thinking: bool | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """What the template sees: plain copies of the input, in the forms that templates expect."""
    if isinstance(messages, str) or not messages:
        raise ValueError("messages: expected a list of at least one message")
    variables = {
        **extra,
        "messages": [_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    try:
        plain: dict[str, Any] = _map_text(variables, lambda text: text)
    except RecursionError:
        raise ValueError("messages: nested too deeply") from None
    return plain


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: {type(message).__name__}, expected a message object")
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where}.role: {role!r}, expected a string")
    result = {**message, "content": _content(message.get("content"), role, f"{where}.content")}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError(f"{where}.tool_calls: {type(calls).__name__}, expected a list")
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return result


def _content(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{where}: {type(content).__name__}, expected text or a list of parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: {type(part).__name__}, expected a content part")
    if part.get("type") != "text":
        raise ValueError(f"{where}: part of type {part.get('type')!r} is not supported, only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where}.text: {type(text).__name__}, expected a string")
    return text


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ValueError(f"{where}: {type(call).__name__}, expected a tool call object")
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _tool_call(function, f"{where}.function")}
    if not isinstance(name := call.get("name"), str):
        raise ValueError(f"{where}.name: {name!r}, expected a string")
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else {**call}


def _arguments(arguments: Any) -> Any:
    """The object that JSON text stands for; anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()  # "\ud83d" is valid JSON, but no text
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _map_text(value: Any, change: Callable[[str], Any], where: str = "") -> Any:
    """A copy of JSON-like `value` with every string changed, keys included."""
    if isinstance(value, str):
        check_text(value, where)
        return change(value)
    if isinstance(value, Mapping):
        return {
            _map_text(key, change, where): _map_text(item, change, f"{where}.{key}".lstrip("."))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_text(item, change, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{where}: {type(value).__name__}, expected text, numbers, lists or objects")


# The template

_PRIVATE = re.compile("[\ue000-\uf8ff]")

# Names that no template can spell.
_STEPS = "lily steps"
_STEP = "lily step"
_SIZED = "lily sized"


def _sources(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    jinja, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.is_file():
        try:
            yield jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{jinja.name}: cannot be read: {error}") from None
    for found in (read_json(wrapped) if wrapped.is_file() else {}, config):
        entry = found.get("chat_template")
        if isinstance(entry, list):
            named = {t.get("name"): t.get("template") for t in entry if isinstance(t, dict)}
            entry = named.get("default")
        if isinstance(entry, str):
            yield entry


def _compile(source: str) -> jinja2.Template:
    import jinja2
    import jinja2.sandbox

    # The options that published templates are written for: those of transformers.
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters |= {"tojson": _tojson, "items": _items, _SIZED: _sized}
    env.filters[_STEP] = jinja2.pass_context(_step)
    for unbounded in ("batch", "center", "slice"):
        del env.filters[unbounded]
    del env.globals["lipsum"]
    env.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    env.intercepted_binops = frozenset({"*", "**"})
    env.binop_table |= {"*": _times, "**": _power}
    try:
        tree = env.parse(source)
        _bound(tree)
        tree.set_environment(env)
        return jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from None


def _bound(tree: jinja2.nodes.Template) -> None:
    """Count every loop round and macro call, and measure what is kept in variables."""
    from jinja2 import nodes

    def step() -> nodes.Filter:
        return nodes.Filter(nodes.Const(True), _STEP, [], [], None, None)

    def count(body: list[nodes.Node]) -> None:
        body.insert(0, nodes.ExprStmt(step()))

    for loop in tree.find_all(nodes.For):
        count(loop.body)
        if loop.test is not None:
            loop.test = nodes.And(step(), loop.test)
    for macro in tree.find_all(nodes.Macro):
        count(macro.body)
    for block in tree.find_all(nodes.CallBlock):
        count(block.body)
    for assign in tree.find_all(nodes.Assign):
        assign.node = nodes.Filter(assign.node, _SIZED, [], [], None, None)


def _step(context: Context, value: object) -> object:
    if next(context[_STEPS], None) is None:
        raise ValueError(f"takes more than {MAX_STEPS} steps")
    return value


def _sized(value: object) -> object:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise ValueError(f"keeps more than {MAX_CHARS} characters in a variable")
    return value


def _times(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and len(one) * int(other) > MAX_CHARS:
            raise ValueError(f"repeats text to more than {MAX_CHARS} characters")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    return left**right


def _check_bits(bits: int) -> None:
    if bits > 1024:
        raise ValueError("computes a number of more than 1024 bits")


def _refuse(reason: str) -> None:
    raise ValueError(reason)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _items(value: Any) -> Any:
    """Jinja's filter, which also takes arguments that are not an object: one named `arguments`."""
    if isinstance(value, str):
        return [("arguments", value)]
    return value.items()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: readable, not escaped for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # private-use characters may stand for spellings: left for encode_chat
        text = re.sub("[^\0-\x7f\ue000-\uf8ff]", lambda match: json.dumps(match[0])[1:-1], text)
    return text
