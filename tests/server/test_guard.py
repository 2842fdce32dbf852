"""Keys, hosts, origins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest

from lily.arguments import build_parser
from lily.server import Settings
from server.running import Running, running
from server.scripted import ScriptedModel, piece

KEY = "a key of some length"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(
        ScriptedModel([piece("ok")]), api_key=KEY, cors=("https://friend.example",)
    ) as server:
        yield server


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer",
        "Bearer \xff",
        f"Bearer {KEY[:-1]}",
    ],
)
def test_without_the_key_nothing_but_page_and_health_is_served(
    server: Running, given: str | None
) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing", "/health/"):
            response = client.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in response.text
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 200


def test_with_the_key_all_is_served(server: Running) -> None:
    assert server.client.get("/v1/models").status_code == 200
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "127.1.2.3", "[::1]:8080"]
)
def test_this_machines_names_are_served(server: Running, host: str) -> None:
    assert server.client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "10.0.0.1"]
)
def test_a_name_rebound_to_this_machine_is_refused(server: Running, host: str) -> None:
    response = server.client.get("/health", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host"


def test_pages_of_other_origins_are_refused(server: Running) -> None:
    own = server.url
    for origin, status in (
        (own, 200),
        ("https://friend.example", 200),
        ("https://evil.example", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
    ):
        response = server.client.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == status, origin


def test_an_allowed_origin_is_told_so_even_when_the_key_is_wrong(server: Running) -> None:
    friend = {"Origin": "https://friend.example"}
    preflight = httpx.options(
        f"{server.url}/v1/chat/completions",
        headers=friend
        | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://friend.example"
    refused = httpx.get(f"{server.url}/v1/models", headers=friend)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://friend.example"


def test_it_listens_to_this_machine_alone_unless_told_otherwise() -> None:
    assert Settings(name="demo").host == "127.0.0.1"
    parser = build_parser(defaultdict(lambda: lambda args: 0))
    assert parser.parse_args(["serve", "folder"]).host == "127.0.0.1"


def test_beyond_this_machine_any_host_is_served() -> None:
    with running(ScriptedModel(), host="0.0.0.0") as server:
        assert server.client.get("/health", headers={"Host": "box.lan"}).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"parallel": 0},
        {"queue": -1},
        {"max_body": 0},
        {"api_key": " "},
        {"name": ""},
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**{"name": "demo", **wrong})  # type: ignore[arg-type]
