"""OpenAI's own client, as installed, against a server with the demo checkpoint."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

import lily
from server.running import Running, running
from server.scripted import ScriptedModel, piece
from server.test_streams import until

MODEL = "examples/demo_model/checkpoint"
HI = [{"role": "user", "content": "Who is Alice?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of the next days",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "metric": {"type": "boolean"},
            },
            "required": ["days", "metric"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "queen"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Iterator[lily.Model]:
    with lily.Model.load(MODEL) as model:
        yield model


@pytest.fixture(scope="module")
def server(demo: lily.Model) -> Iterator[Running]:
    with running(demo, api_key="key", parallel=3) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "demo", "messages": HI, "max_tokens": 24} | options
    return client.chat.completions.create(**given)


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_stream_says_what_a_whole_reply_says(client: Any) -> None:
    options: dict[str, Any] = {"seed": 3, "max_tokens": 60}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    thought = "".join(
        getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices
    )
    message = whole.choices[0].message
    assert text == message.content
    assert thought == (message.reasoning_content or "")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0, "the prompt was just computed"


def test_a_conversation_reuses_what_came_before(client: Any) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You tell of the Count and his ship. " * 20},
        {"role": "user", "content": "Begin."},
    ]
    first = chat(client, messages=messages, extra_body={"thinking": False})
    messages += [first.choices[0].message, {"role": "user", "content": "And then?"}]
    second = chat(client, messages=messages, extra_body={"thinking": False})
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 2


def test_without_thinking_there_is_none(client: Any) -> None:
    for off in (
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        reply = chat(client, **off)
        assert reply.choices[0].message.reasoning_content is None
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0
        assert reply.choices[0].message.content


def test_a_thinking_budget_leaves_room_for_the_answer(client: Any) -> None:
    reply = chat(client, max_tokens=80, temperature=0, extra_body={"thinking": 5})
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 16
    assert reply.choices[0].message.content
    assert reply.lily["thinking_end"] in ("budget", "closed")


def test_the_cap_inside_a_thought_leaves_no_content(client: Any) -> None:
    reply = chat(client, max_tokens=3, temperature=0)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.reasoning_content
    assert not reply.choices[0].message.content


@pytest.mark.parametrize("thinking", [False, 8])
def test_a_json_schema_is_kept(client: Any, thinking: bool | int) -> None:
    for seed in range(2):
        reply = chat(
            client,
            max_tokens=200,
            seed=seed,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "being", "schema": SCHEMA, "strict": True},
            },
            extra_body={"thinking": thinking},
        )
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


def test_any_json_object_is_kept(client: Any) -> None:
    reply = chat(
        client,
        max_tokens=300,
        response_format={"type": "json_object"},
        temperature=0,
        extra_body={"thinking": False},
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    else:
        assert reply.choices[0].message.content.lstrip().startswith("{")


def test_a_required_call_is_made(client: Any) -> None:
    options: dict[str, Any] = {
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 300,
        "seed": 1,
        "extra_body": {"thinking": False},
    }
    reply = chat(client, **options)
    assert reply.choices[0].finish_reason == "tool_calls"
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["days"] in range(1, 10)
    assert isinstance(arguments["metric"], bool)
    answered = chat(
        client,
        messages=[
            *HI,
            reply.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
        ],
        tools=[WEATHER],
        tool_choice="none",
    )
    assert not answered.choices[0].message.tool_calls


def test_the_clients_own_loop_over_a_streamed_call() -> None:
    script = [
        piece(reasoning="They want weather."),
        piece("Let me look."),
        piece(call=(0, "call_1", "weather", "")),
        piece(call=(0, "call_1", "weather", '{"city":')),
        piece(call=(0, "call_1", "weather", ' "Paris"}')),
    ]
    with (
        running(ScriptedModel(script)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.chat.completions.stream(model="demo", messages=HI, tools=[WEATHER]) as stream,  # type: ignore[list-item]
    ):
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert final.choices[0].finish_reason == "tool_calls"


def test_log_probabilities(client: Any) -> None:
    reply = chat(client, logprobs=True, top_logprobs=3, temperature=0, max_tokens=6)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"


def test_a_stop_string_ends_the_answer_before_it(client: Any) -> None:
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"thinking": False}}
    text = chat(client, **options).choices[0].message.content
    stop = text[5:9]
    cut = chat(client, stop=stop, **options).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_errors_are_the_clients_errors(server: Running, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, extra_body={"temprature": 1})
    assert error.value.param == "temprature"
    with pytest.raises(openai.BadRequestError, match="expected at most") as error:
        chat(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="messages"):
        chat(client, messages=[])
    with pytest.raises(openai.BadRequestError, match="image_url"):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        chat(client, messages=[{"role": "user", "content": [image]}])
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        chat(stranger)
    assert chat(client).choices[0].message


def test_leaving_a_stream_stops_the_reply(server: Running, client: Any) -> None:
    for _ in range(3):
        with chat(client, stream=True, max_tokens=4000, temperature=1) as stream:
            for _ in zip(range(3), stream, strict=False):
                pass
        until(server.idle)


def test_completions_whole_and_streamed(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(prompt="Once upon a", logprobs=2, **options)
    text = whole.choices[0].text
    assert text and whole.choices[0].finish_reason == "length"
    found = whole.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 12
    assert all(len(top) == 2 for top in found.top_logprobs)
    streamed = client.completions.create(prompt=["Once upon a"], stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    ids = whole.usage.prompt_tokens
    tokens = client.post("/../tokenize", body={"content": "Once upon a"}, cast_to=object)
    assert len(tokens["tokens"]) == ids
    by_ids = client.completions.create(prompt=tokens["tokens"], **options)
    assert by_ids.choices[0].text == text


def test_the_asynchronous_client_runs_replies_side_by_side(server: Running) -> None:
    async def play() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key") as client:
            replies = (
                chat(client, messages=[{"role": "user", "content": f"Say {n}."}], seed=n)
                for n in range(8)
            )
            return await asyncio.gather(*replies)

    replies = asyncio.run(play())
    assert all(reply.usage.completion_tokens for reply in replies)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": [4_000_000]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        (
            {
                "extra_body": {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"schema": {"not": {"type": "null"}}},
                    }
                }
            },
            "response_format",
        ),
    ],
)
def test_a_wrong_completion_is_a_400_and_the_next_is_normal(
    client: Any, wrong: dict[str, Any], param: str, stream: bool
) -> None:
    options = {"model": "demo", "prompt": "Once", "max_tokens": 2, "stream": stream}
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**options | wrong)
    assert error.value.param == param
    assert client.completions.create(**options | {"stream": False}).choices[0].text


def test_clients_that_go_at_any_moment_leave_the_model_as_it_was(
    server: Running, client: Any
) -> None:
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"reuse": "exact"}}
    before = chat(client, **options).choices[0].message
    pick = random.Random(2)
    port = int(server.url.rpartition(":")[2])
    for n in range(40):
        text = pick.choice(["Who is Alice?", f"{n} " + "tell " * pick.randrange(2000)])
        body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": n % 3 > 0})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port)) as own:
            own.sendall((head + body).encode())
            time.sleep(pick.choice([0, 0.005, 0.05]))
    until(server.idle)
    after = chat(client, **options).choices[0].message
    assert (after.reasoning_content, after.content) == (before.reasoning_content, before.content)
