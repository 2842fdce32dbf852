"""Streams while they run: failures, silence, progress, and clients that go."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lily.errors import DeviceError
from server.running import Running, running
from server.scripted import ScriptedModel, piece, prefill, wait_for
from server.test_chat import events

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
CHAT = "/v1/chat/completions"


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what must come about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it came about in time"
        time.sleep(0.01)


@pytest.mark.parametrize("error", [DeviceError("metal: lost"), RuntimeError("a bug")])
def test_a_failure_before_the_first_piece_is_a_500(error: Exception) -> None:
    with running(ScriptedModel([lambda reply: reply.compute(1, 2), error])) as server:
        for stream in (False, True):
            response = server.chat(stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert "a bug" not in response.text, "what happened inside stays inside"
        until(server.idle)


def test_a_failure_in_a_stream_is_an_event_and_then_the_end() -> None:
    steps = iter([[piece("Hel"), DeviceError("metal: lost")], [piece("fine")]])
    with running(ScriptedModel(lambda _: next(steps))) as server:
        *chunks, error, end = events(server.chat(stream=True).text)
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)
        assert error["error"]["message"] == "metal: lost"
        assert end == "[DONE]"
        assert server.chat().json()["choices"][0]["message"]["content"] == "fine"


def test_a_reply_that_cannot_be_written_is_an_event_too() -> None:
    with running(ScriptedModel([piece("a"), object()])) as server:
        *_, error, end = events(server.chat(stream=True).text)
        assert "AttributeError" in error["error"]["message"]
        assert end == "[DONE]"
        until(server.idle)


def test_a_silent_stream_is_kept_alive_and_progress_is_shown_only_when_asked() -> None:
    def read(options: dict[str, Any]) -> tuple[int, list[Any]]:
        done = threading.Event()
        model.steps = [prefill(3, done), piece("x")]
        text = ""
        with server.client.stream("POST", CHAT, json=ASK | options) as response:
            assert response.status_code == 200
            for part in response.iter_text():
                text += part
                if text.count(": keep-alive") >= 2 or text.count('"progress"') >= 3:
                    done.set()
        return text.count(": keep-alive"), events(text)

    model = ScriptedModel()
    with running(model, keep_alive_s=0.05) as server:
        comments, plain = read({})
        assert comments >= 2
        assert all("progress" not in chunk for chunk in plain)
        _, shown = read({"stream_options": {"include_progress": True}})
        progress = [chunk["progress"] for chunk in shown if "progress" in chunk]
        assert progress[:3] == [{"done": n, "total": 3} for n in (1, 2, 3)]


def test_a_client_that_goes_stops_the_reply() -> None:
    never = threading.Event()
    with running(ScriptedModel([piece("a"), wait_for(never), piece("b")])) as server:
        with server.client.stream("POST", CHAT, json=ASK) as response:
            next(response.iter_bytes())
        until(server.idle)
        reply = server.state.model.replies[0]
        assert reply.cancelled.is_set() and reply.closed


def test_a_client_that_goes_while_its_prompt_is_computed_stops_it_at_the_next_chunk() -> None:
    never = threading.Event()
    with running(ScriptedModel([prefill(5, never)])) as server:
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                server.client.post(CHAT, json=ASK | {"stream": stream}, timeout=0.3)
            until(server.idle)
        assert server.state.model.closed == 2


def test_200_clients_that_go_at_any_moment_leave_an_idle_server() -> None:
    def slowly(_: Any) -> None:
        time.sleep(0.001)

    steps: list[Any] = [prefill(3, threading.Event()), piece("never")]
    scripts = [[slowly, piece("word ")] * 20, steps]
    pick = random.Random(1)
    with running(ScriptedModel(lambda _: pick.choice(scripts)), parallel=3) as server:
        body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        port = int(server.url.rpartition(":")[2])
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", port)) as client:
                data = head + body
                client.sendall(data[: pick.choice([len(data), pick.randrange(len(data))])])
                time.sleep(pick.choice([0, 0.001, 0.01]))
                if pick.random() < 0.5:
                    client.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                    )  # reset
        until(server.idle)
        scripts[:] = [[piece("still here")]]
        assert server.chat().json()["choices"][0]["message"]["content"] == "still here"
        assert server.state.model.closed == len(server.state.model.replies)


def test_the_server_ends_while_replies_run() -> None:
    never = threading.Event()
    found: list[Any] = []

    def read(server: Running, seen: threading.Event) -> None:
        text = ""
        with httpx.stream("POST", server.url + CHAT, json=ASK, timeout=30) as response:
            for part in response.iter_text():
                text += part
                seen.set()
        found.extend(events(text))

    with running(ScriptedModel([piece("a"), wait_for(never)])) as server:
        seen = threading.Event()
        reader = threading.Thread(target=read, args=(server, seen))
        reader.start()
        assert seen.wait(10)
    reader.join(10)
    *_, error, end = found
    assert "stopping" in error["error"]["message"] and end == "[DONE]"
    assert server.state.model.closed == 1
