"""Requests as OpenAI's API defines them, and lily's few additions.

Null means "not given". Every option takes effect or is refused; a name that is not here is refused
as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from lily.reuse import Reuse

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Stop = str | list[str]

Text = {"type": "string"}
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {
                        "anyOf": [
                            Text,
                            {"type": "null"},
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["type", "text"],
                                    "properties": {"type": {"const": "text"}, "text": Text},
                                },
                            },
                        ]
                    },
                    "reasoning_content": {"type": ["string", "null"]},
                    "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                    "tool_call_id": {"type": ["string", "null"]},
                },
            },
        }
    ),
]


class Options(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingOptions(Options):
    """How tokens are drawn; checked by `lily.Sampling`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        None, description="token id, in decimal digits, to what is added to its logit"
    )


class StreamOptions(Options):
    include_usage: bool | None = None
    include_progress: bool | None = Field(
        None, description="also send how much of the prompt is computed"
    )


class TemplateOptions(Options):
    """Variables of the chat template."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = Field(
        None, description="keep the thinking of earlier replies in the prompt"
    )


class JsonSchema(Options):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Options):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(SamplingOptions):
    """What chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: Stop | None = None
    n: int | None = Field(None, description="only 1")
    reuse: Reuse | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, description="accepted; no effect")


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false ends the reply after its first call"
    )
    thinking: bool | int | None = Field(
        None, description="off, on, or the most tokens to think for"
    )
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="accepted; no effect")
    store: bool | None = Field(None, description="only false: nothing is kept")


Tokens = list[int]
Prompt = str | Tokens | list[str] | list[Tokens]


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(None, description="log probabilities of so many best tokens")
    echo: bool | None = Field(None, description="only false")
    best_of: int | None = Field(None, description="only 1")
    suffix: str | None = Field(None, description="only empty")
    special: bool | None = Field(
        None, description="spellings such as <|im_end|> in a text prompt are those tokens"
    )


class TokenizeRequest(Options):
    """The body of `/tokenize`."""

    content: str
    special: bool | None = Field(
        None, description="spellings such as <|im_end|> become those tokens"
    )
    model: str | None = None


class DetokenizeRequest(Options):
    """The body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


class TemplateRequest(Options):
    """The body of `/apply-template`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    model: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetail
