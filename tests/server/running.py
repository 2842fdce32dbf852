"""A server in a thread, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from lily.server import Settings, create_app
from lily.server.run import Server, listen


@dataclass
class Running:
    """A server that listens.

    Attributes:
        url: its address.
        client: speaks to it.
        server: uvicorn's.
        state: what its routes share.
    """

    url: str
    client: httpx.Client
    server: Server
    state: Any

    def chat(self, text: str = "hi", **options: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"messages": messages} | options)

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        health = self.client.get("/health").json()
        return health["running"] == health["waiting"] == 0


@contextlib.contextmanager
def running(model: Any, **settings: Any) -> Iterator[Running]:
    """Serve `model` on a free port; within, requests may be made."""
    chosen = Settings(**{"name": "demo", "port": 0} | settings)
    app = create_app(model, chosen)
    with listen("127.0.0.1", 0) as own:
        server = Server(app, chosen)
        thread = threading.Thread(target=server.run, args=([own],))
        thread.start()
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
        try:
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                yield Running(url, client, server, app.state.lily)
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive(), "the server ends"
