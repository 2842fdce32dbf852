"""What stands before every route: who may ask, from where, and how much.

A server on this machine alone can still be reached by any web page that its user opens. Two rules
keep those out: the Host header must name this machine (a page whose domain is rebound to 127.0.0.1
sends its own), and a request that a browser marks with an Origin must come from the server's own
page or from an origin that was allowed.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lily.server.failures import ApiError
from lily.server.settings import Settings, is_loopback

OPEN_PATHS = frozenset({"/", "/health"})
"""Served without a key: the page asks for one, and health is for machines that have none."""


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """`app` behind all that `settings` asks for, the outermost first."""
    inner: ASGIApp = _Limited(app, settings.max_body)
    if settings.api_key is not None:
        inner = _Keyed(inner, settings.api_key)
    if settings.cors:
        inner = CORSMiddleware(
            inner, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"]
        )
    return _Local(inner, settings)


class _Guard:
    """Middleware that lets a request pass or answers with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        raise NotImplementedError

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Local(_Guard):
    """Refuses foreign Host headers on loopback, and pages of other origins anywhere."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(app)
        self._loopback = settings.loopback
        self._origins = frozenset(settings.cors)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._loopback and not is_loopback(_hostname(host)):
            raise ApiError(403, f"host: {host[:80]!r}, expected this machine's name", code="host")
        origin = headers.get("origin")
        if origin is None or self._origins & {origin, "*"}:
            return
        if origin.partition("://")[2] != host:
            raise ApiError(
                403, f"origin: {origin[:80]!r}, expected the server's own page", code="origin"
            )


def _hostname(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


class _Keyed(_Guard):
    """Asks for the key, in the time that comparing takes whatever was sent."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        super().__init__(app)
        self._key = key.encode()

    def _check(self, path: str, headers: Headers) -> None:
        if path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key):
            raise ApiError(
                401,
                "authorization: expected the server's API key as a bearer token",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class _Limited(_Guard):
    """Refuses a body that is too large, if possible before a byte of it is read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        super().__init__(app)
        self._limit = limit

    def _check(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self._limit:
            raise self._too_large(f"{length[:20]} bytes")

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise self._too_large(f"over {self._limit} bytes")
            return message

        await self._app(scope, counted, send)

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413, f"body: {found}, expected at most {self._limit}", code="request_too_large"
        )
