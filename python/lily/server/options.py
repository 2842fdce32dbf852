"""From the fields of a request to the arguments of a call; wrong ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lily.sampling import OPTIONS, Sampling
from lily.server.failures import ApiError, refused
from lily.server.protocol import ChatRequest, GenerationRequest, ResponseFormat, TemplateOptions
from lily.stops import StopStrings
from lily.stream import MOST_LOGPROBS
from lily.whole_numbers import check_whole

BUDGETS: Mapping[str, bool | int] = {
    "none": False, "minimal": 256, "low": 1024, "medium": 4096, "high": True, "xhigh": True,
}  # fmt: skip
"""Thinking for each `reasoning_effort`: off, tokens, or as long as it takes."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = frozenset({"role", "name", "reasoning_content", "tool_call_id"})
_MESSAGE = _TEXTS | {"content", "tool_calls"}
# Fields of OpenAI's replies, which clients send back as they came.
_REPLY = frozenset({"refusal", "audio", "annotations", "function_call"})


def check_model(asked: str | None, name: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404, as OpenAI answers.
    """
    if asked is not None and asked != name:
        raise ApiError(
            404, f"model: {asked[:80]!r}, expected {name!r}", param="model", code="model_not_found"
        )


def sampling(request: GenerationRequest, defaults: Sampling, n_tokens: int) -> Sampling:
    """How to draw: the request's options over `defaults`.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in OPTIONS}
    if request.logit_bias is not None:
        given["logit_bias"] = {
            _token_id(id, n_tokens): bias for id, bias in request.logit_bias.items()
        }
    return defaults.merged(given)


def _token_id(text: str, n_tokens: int) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < n_tokens:
        return int(text)
    raise refused(f"logit_bias: {text[:40]!r}, expected a token id in [0, {n_tokens})")


def common(request: GenerationRequest, defaults: Sampling, n_tokens: int) -> dict[str, Any]:
    """The arguments that `Model.chat` and `Model.generate` share; ids are in [0, n_tokens)."""
    _only("n", request.n, 1)
    stop = request.stop if request.stop is not None else ()
    StopStrings(stop)
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options: given, expected only with stream")
    if request.max_tokens is not None:
        check_whole("max_tokens", request.max_tokens, 1)
    return {
        "sampling": sampling(request, defaults, n_tokens),
        "stop": stop,
        "reuse": request.reuse or "any",
        "format": output_format(request.response_format),
        "max_tokens": request.max_tokens,
    }


def chat_arguments(request: ChatRequest, defaults: Sampling, n_tokens: int) -> dict[str, Any]:
    """The arguments of `Model.chat`.

    Raises:
        ValueError, ApiError: an option is wrong, or contradicts another.
    """
    arguments = common(request, defaults, n_tokens)
    if request.store:
        raise refused("store: true, expected false: nothing is kept")
    arguments["max_tokens"] = _max_tokens(request)
    arguments["messages"] = messages(request.messages)
    arguments["tools"] = request.tools
    if request.tool_choice is not None:
        arguments["tool_choice"] = request.tool_choice
    arguments["parallel_tool_calls"] = request.parallel_tool_calls is not False
    arguments["thinking"] = thinking(request)
    arguments["logprobs"] = _logprobs(request)
    template = template_variables(request.chat_template_kwargs)
    template.pop("enable_thinking", None)
    return arguments | {"template": template}


def template_variables(given: TemplateOptions | None) -> dict[str, Any]:
    """The variables of the chat template that a request gives."""
    return {} if given is None else given.model_dump(exclude_none=True)


def messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the template, without what clients send back for no purpose.

    Raises:
        ApiError: there are none, or a field is unknown.
    """
    if not given:
        raise refused("messages: empty, expected at least one")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = {}
    for name, value in given.items():
        if name in _REPLY and not value:
            continue
        if name not in _MESSAGE:
            raise refused(
                f"{where}.{name[:80]}: unknown field, expected one of {', '.join(sorted(_MESSAGE))}"
            )
        if name in _TEXTS and not isinstance(value, str | None):
            raise refused(f"{where}.{name}: {type(value).__name__}, expected a string")
        if value is not None or name == "content":
            message[name] = value
    role = message.get("role")
    if role not in ROLES:
        raise refused(f"{where}.role: {role!r:.40}, expected one of {', '.join(ROLES)}")
    if role == "developer":
        message["role"] = "system"
    return message


def thinking(request: ChatRequest) -> bool | int | None:
    """Whether, or for how many tokens, to think; None leaves it to the template.

    Raises:
        ApiError: two options say different things.
    """
    kwargs, effort = request.chat_template_kwargs, request.reasoning_effort
    given = {
        "thinking": request.thinking,
        "reasoning_effort": None if effort is None else BUDGETS[effort],
        "chat_template_kwargs": None if kwargs is None else kwargs.enable_thinking,
    }
    said = {name: value for name, value in given.items() if value is not None}
    budgets = {value for value in said.values() if not isinstance(value, bool)}
    if len({value is not False for value in said.values()}) > 1 or len(budgets) > 1:
        raise refused(f"{' and '.join(said)}: contradict each other", next(iter(said)))
    for budget in budgets:
        if budget < 0:
            raise refused(f"thinking: {budget}, expected true, false or a number of tokens")
        return budget
    return next(iter(said.values()), None)


def output_format(asked: ResponseFormat | None) -> Any:
    """The argument `format` of a call.

    Raises:
        ApiError: a schema is missing, or not wanted.
    """
    if asked is None or asked.type == "text":
        wanted = None
    elif asked.type == "json_object":
        wanted = "json"
    elif asked.json_schema is None:
        raise refused("response_format.json_schema: missing, expected an object with a schema")
    else:
        return asked.json_schema.schema_
    if asked is not None and asked.json_schema is not None:
        raise refused(
            f"response_format.json_schema: given, expected only with type 'json_schema', not"
            f" {asked.type!r}"
        )
    return wanted


def _max_tokens(request: ChatRequest) -> int | None:
    new, old = request.max_completion_tokens, request.max_tokens
    if new is None:
        return old
    if old is not None and old != new:
        raise refused(
            f"max_tokens: {old}, expected the value of max_completion_tokens, {new}, or only one"
        )
    return check_whole("max_completion_tokens", new, 1)


def _logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise refused("top_logprobs: given, expected only with logprobs")
    if top is not None:
        check_whole("top_logprobs", top, 0, MOST_LOGPROBS)
    return (top or 0) if request.logprobs else None


def _only(name: str, value: object, wanted: object) -> None:
    """Refuse an option that exists for the sake of one value."""
    if value is not None and value != wanted:
        raise refused(f"{name}: {value!r}, expected {wanted!r}: nothing else is supported")
