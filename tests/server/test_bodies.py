"""Whatever is sent, the answer is an error that names what is wrong, and never a 500."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.server.bodies import MAX_DEPTH, parse
from lily.server.failures import ApiError
from server.running import Running, running
from server.scripted import ScriptedModel, piece

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptedModel([piece("ok")]), max_body=200_000) as server:
        yield server


def deep(n: int) -> bytes:
    return b'{"messages": ' + b"[" * n + b"]" * n + b"}"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b"\xff\xfe", "body: byte 0"),
        (b'\xef\xbb\xbf{"messages": []}', "body"),
        (b'{"temperature": NaN}', "body: NaN"),
        (b'{"temperature": -Infinity}', "body: -Infinity"),
        (b'{"temperature": 1e999}', "body: 1e999"),
        (b'{"seed": ' + b"9" * 30 + b', "messages": [{"role": "user", "content": "x"}]}', "seed"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "body: 9999"),
        (deep(MAX_DEPTH), "body: nested"),
        (deep(90_000), "body: nested"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "\\udc00", "content": ""}]}', "messages[0].role"),
        (b'{"stop": ["a", "\\ud83dx"], "messages": []}', "stop[1]"),
        (b'{"\\ud83d": 1}', "name of a field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "a\\u0000b": 1}', "a\0b"),
    ],
)
def test_a_broken_body_is_a_400(server: Running, body: bytes, where: str) -> None:
    response = server.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(where)
    assert set(error) == {"message", "type", "param", "code"}


def test_a_whole_pair_in_json_is_a_character(server: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    response = server.client.post(
        CHAT, content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 200
    assert server.state.model.calls[-1]["messages"][0]["content"] == "😀"


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ud8eE+-.0123456789ntf', max_size=60))
def test_no_body_breaks_the_parser(body: bytes | str) -> None:
    data = body if isinstance(body, bytes) else body.encode()
    try:
        parse(data)
    except ApiError as error:
        assert error.status_code == 400


def test_another_media_type_is_refused(server: Running) -> None:
    response = server.client.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_large_body_is_refused_before_it_is_read(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(10)
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n".encode()
        )
        answer = b""
        while b"300000" not in answer and (more := client.recv(65_536)):  # the body never comes
            answer += more
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"300000" in answer


def test_a_large_body_of_unknown_length_is_refused(server: Running) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    response = httpx.post(
        server.url + CHAT, content=chunks(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


def test_paths_and_methods_that_are_not_there_answer_in_the_same_form(server: Running) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = server.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"]


def test_a_refused_request_harms_no_later_one(server: Running) -> None:
    assert server.client.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert server.client.post("/detokenize", json={"tokens": [104, 105]}).json() == {
        "content": "hi"
    }
    assert server.chat().status_code == 200
