"""What the server says of itself."""

from __future__ import annotations

import re
import threading
from typing import Any

from server.running import running
from server.scripted import ScriptedModel, piece, wait_for
from server.test_streams import until

SAMPLE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]+"\})? [0-9.e+-]+')


def test_metrics_count_replies_by_how_they_ended_and_tokens() -> None:
    scripts: list[Any] = [[piece("a"), piece("b")], [RuntimeError("a bug")], [piece("c")]]
    with running(ScriptedModel(lambda _: scripts.pop(0))) as server:
        server.chat()
        server.chat()
        server.chat("x" * 2000)
        server.chat(temperature=-1)
        server.chat()
        response = server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    assert all(line.startswith("# ") or SAMPLE.fullmatch(line) for line in lines)
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert found['lily_replies_total{end="finished"}'] == "2"
    assert found['lily_replies_total{end="failed"}'] == "1"
    assert found['lily_replies_total{end="refused"}'] == "1"
    assert found['lily_tokens_total{kind="prompt"}'] == "10"
    assert found['lily_tokens_total{kind="generated"}'] == "3"
    assert found['lily_first_token_seconds_bucket{le="+Inf"}'] == "2"
    assert found['lily_first_token_seconds_bucket{le="0.05"}'] == "0"


def test_a_reply_whose_client_went_counts_as_cancelled() -> None:
    with running(ScriptedModel([piece("a"), wait_for(threading.Event())])) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_bytes())
        until(server.idle)
        assert 'lily_replies_total{end="cancelled"} 1' in server.client.get("/metrics").text


def test_the_model_says_its_context_and_its_sampling() -> None:
    with running(ScriptedModel()) as server:
        [model] = server.client.get("/v1/models").json()["data"]
        assert model == server.client.get("/v1/models/demo").json()
    assert model["context"] == 1000
    assert model["sampling"]["top_k"] == 20
    assert model["owned_by"] == "lily"
