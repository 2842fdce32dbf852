"""Chats over HTTP: what is asked for reaches the model, what it says reaches the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.running import Running, running
from server.scripted import ScriptedModel, logprob, piece

CALL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    model = ScriptedModel([piece(reasoning="Hm."), piece("Hel"), piece("lo 👩‍👩‍👧")])
    with running(model) as server:
        yield server


@pytest.fixture
def model(served: Running) -> ScriptedModel:
    model: ScriptedModel = served.state.model
    model.calls.clear()
    return model


@pytest.fixture
def server(served: Running, model: ScriptedModel) -> Running:
    return served


def events(text: str) -> list[Any]:
    """The data of an event stream, its end marker as a string."""
    data = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def test_a_reply_has_message_reason_counts_and_times(server: Running) -> None:
    reply = server.chat().json()
    choice = reply["choices"][0]
    assert choice["message"]["content"] == "Hello 👩‍👩‍👧"
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["finish_reason"] == "stop"
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert reply["timings"]["first_token_s"] == 0.1
    assert reply["lily"]["seed"] == 7
    assert reply["lily"]["sampling"]["temperature"] == 0.6


def test_a_stream_is_role_pieces_reason_and_end(server: Running) -> None:
    response = server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, end = events(response.text)
    assert end == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [
        {"reasoning_content": "Hm."},
        {"content": "Hel"},
        {"content": "lo 👩‍👩‍👧"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks), "nobody asked for it"


def test_usage_comes_last_and_without_choices_when_asked(server: Running) -> None:
    *_, usage, end = events(server.chat(stream=True, stream_options={"include_usage": True}).text)
    assert end == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"max_tokens": None, "thinking": None, "format": None, "reuse": "any", "stop": ()}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"thinking": False}, {"thinking": False}),
        ({"thinking": 0}, {"thinking": 0}),
        ({"thinking": 99}, {"thinking": 99}),
        ({"reasoning_effort": "none"}, {"thinking": False}),
        ({"reasoning_effort": "low"}, {"thinking": 1024}),
        ({"reasoning_effort": "high"}, {"thinking": True}),
        ({"reasoning_effort": "low", "thinking": True}, {"thinking": 1024}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
        (
            {"chat_template_kwargs": {"preserve_thinking": True}},
            {"thinking": None, "template": {"preserve_thinking": True}},
        ),
        ({"reuse": "exact"}, {"reuse": "exact"}),
        ({"response_format": {"type": "text"}}, {"format": None}),
        ({"response_format": {"type": "json_object"}}, {"format": "json"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
                }
            },
            {"format": {"type": "object"}},
        ),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"tools": [CALL], "tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tools": [CALL]}, {"tools": [CALL], "parallel_tool_calls": True}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (
            {"n": 1, "user": "me", "store": False, "metadata": {"a": "b"}, "model": "demo"},
            {"max_tokens": None},
        ),
        ({"temperature": None, "max_tokens": None, "tools": None}, {"max_tokens": None}),
    ],
)
def test_options_reach_the_model(
    server: Running, model: ScriptedModel, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert server.chat(**given).status_code == 200
    call = model.calls[-1]
    assert {name: call[name] for name in wanted} == wanted


def test_sampling_is_the_calls_then_the_servers_then_the_checkpoints(
    model: ScriptedModel,
) -> None:
    with running(model, sampling={"top_k": 5, "min_p": 0.1}) as server:
        server.chat(min_p=0.2, logit_bias={"12": -100})
        used = model.calls[-1]["sampling"]
        assert (used.temperature, used.top_k, used.min_p) == (0.6, 5, 0.2)
        assert used.banned_ids == {12}
        assert server.client.get("/v1/models").json()["data"][0]["sampling"]["top_k"] == 5


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        ({"thinking": -1}, "thinking"),
        ({"thinking": False, "reasoning_effort": "high"}, "thinking"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"store": True}, "store"),
        ({"reuse": "some"}, "reuse"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "friend", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    server: Running, model: ScriptedModel, given: dict[str, Any], param: str
) -> None:
    response = server.chat(**given)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert not model.calls


def test_a_typo_is_told_what_was_meant(server: Running) -> None:
    assert "did you mean temperature?" in server.chat(temprature=1).json()["error"]["message"]


def test_another_model_is_not_found(server: Running) -> None:
    response = server.chat(model="gpt-4")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: Running) -> None:
    for stream in (False, True):
        response = server.chat("x" * 2000, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "2000" in error["message"] and "1000" in error["message"]
        assert error["code"] == "context_length_exceeded"


def test_what_clients_send_back_of_a_reply_is_fine(server: Running, model: ScriptedModel) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": "so?"},
    ]
    assert server.chat(messages=messages).status_code == 200
    assert model.calls[-1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "so?"},
    ]


def test_tool_calls_have_their_own_place_and_id() -> None:
    model = ScriptedModel(
        [
            piece(call=(0, "call_a", "now", "")),
            piece(call=(0, "call_a", "now", '{"zone": ')),
            piece(call=(0, "call_a", "now", '"UTC"}')),
            piece(call=(1, "call_b", "now", "{}")),
        ]
    )
    with running(model) as server:
        whole = server.chat(tools=[CALL]).json()["choices"][0]
        *chunks, _ = events(server.chat(tools=[CALL], stream=True).text)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    joined: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            one = joined.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            one["id"] += call.get("id", "")
            for name in ("name", "arguments"):
                one[name] += call["function"].get(name, "")
    assert [joined[i] for i in (0, 1)] == [
        {"id": call["id"], **call["function"]} for call in whole["message"]["tool_calls"]
    ]
    assert joined[0]["arguments"] == '{"zone": "UTC"}'


def test_log_probabilities_come_when_asked() -> None:
    entry = logprob("Hi", -0.5, ((1, "Hi", -0.5), (2, "Ho", -1.5)))
    with running(ScriptedModel([piece("Hi", logprob=entry)])) as server:
        whole = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
        chunks = events(server.chat(logprobs=True, top_logprobs=2, stream=True).text)
        without = server.chat().json()["choices"][0]["logprobs"]
    assert whole == chunks[1]["choices"][0]["logprobs"]
    assert whole["content"][0]["bytes"] == [72, 105]
    assert [top["token"] for top in whole["content"][0]["top_logprobs"]] == ["Hi", "Ho"]
    assert without is None
