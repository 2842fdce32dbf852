"""What a server is told when it starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server, checked when made.

    Args:
        name: what clients call the model.
        host, port: where it listens; port 0 takes a free one.
        api_key: what clients must send as a bearer token; None asks for nothing.
        parallel: replies that run at once, each in its own session.
        queue: requests that may wait for their turn.
        max_body: bytes of a request's body.
        cors: origins whose pages may call the server; "*" is any.
        sampling: options that hold where a request says nothing, over the checkpoint's.
        keep_alive_s: longest silence of a stream; a comment then shows that it lives.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    parallel: int = 4
    queue: int = 64
    max_body: int = 16 * MIB
    cors: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keep_alive_s: float = 3.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: empty, expected what clients call the model")
        for name, low, high in (
            ("port", 0, 65_535),
            ("parallel", 1, 1024),
            ("queue", 0, 1 << 20),
            ("max_body", 1, 1 << 40),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}: {getattr(self, name)}, expected {low}…{high}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ValueError("api_key: expected visible ASCII characters")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
