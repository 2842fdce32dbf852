"""Running a server until it is told to end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from lily.server.app import create_app
from lily.server.settings import Settings

if TYPE_CHECKING:
    from lily.model import Model

END_S = 5
"""How long connections may take to end."""


class Server(uvicorn.Server):
    """Uvicorn's server, which first ends the replies that run."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=END_S,
                ws="none",
            )
        )
        self._crew = app.state.lily.crew

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._crew.stop()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections.

    Raises:
        OSError: the address is not this machine's, or is taken.
    """
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=1024,
    )


def serve(model: Model, settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve `model` until Ctrl-C or SIGTERM; replies that run are then cancelled.

    Args:
        model: it stays open.
        settings: see `Settings`.
        ready: called with the server's address when it can be reached.

    Raises:
        OSError: the address is not this machine's, or is taken.
        KeyboardInterrupt: after Ctrl-C, when everything has ended.
    """
    with listen(settings.host, settings.port) as own:
        server = Server(create_app(model, settings), settings)
        if ready is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            ready(f"http://{host}:{own.getsockname()[1]}")
        server.run([own])
