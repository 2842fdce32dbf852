"""Bodies of requests: strict JSON, and the route class that reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from lily.server.failures import ApiError, refused
from lily.tokenizer import check_text

MAX_DEPTH = 64
"""Lists and objects inside each other."""

LARGE = 1 << 16
"""Bytes from which a body is parsed beside the event loop."""

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_JSON = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)


def parse(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: it is not strict JSON in UTF-8, nested too deeply, or holds half a surrogate pair;
            the message says where.
    """
    if not body:
        raise refused("body: empty, expected a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise refused(f"body: byte {error.start}: expected UTF-8 text") from None
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except json.JSONDecodeError as error:
        raise refused(f"body: character {error.pos}: {error.msg}, expected JSON") from None
    except RecursionError:
        raise refused(_DEPTH) from None
    _check(value, bool(_HALF_PAIR.search(body)))
    return value


_DEPTH = f"body: nested more than {MAX_DEPTH} deep"


def _constant(name: str) -> NoReturn:
    raise refused(f"body: {name}, expected a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise refused(f"body: {text[:40]}, expected a number below 1.8e308")
    return value


def _int(text: str) -> int:
    if len(text) > 40:
        raise refused(f"body: {text[:40]}..., expected an integer of at most 40 digits")
    return int(text)


def _check(value: Any, halves: bool) -> None:
    """Refuse deep nesting and, where `halves` may be, text that no encoding carries."""
    waiting: list[tuple[Any, str, int]] = [(value, "", 0)]
    while waiting:
        item, where, depth = waiting.pop()
        if halves and isinstance(item, str):
            try:
                check_text(item, where or "body")
            except ValueError as error:
                raise refused(str(error), where) from None
        if not isinstance(item, dict | list):
            continue
        if depth == MAX_DEPTH:
            raise refused(_DEPTH)
        if isinstance(item, list):
            waiting += [
                (part, f"{where}[{i}]" if halves else "", depth + 1)
                for i, part in enumerate(item)
                if isinstance(part, str | dict | list)
            ]
            continue
        for key, part in item.items():
            if halves:
                try:
                    check_text(key, where or "body")
                except ValueError as error:
                    raise refused(f"name of a field in {error}", where or "body") from None
            if isinstance(part, str | dict | list):
                waiting.append((part, f"{where}.{key}".lstrip(".") if halves else "", depth + 1))


class StrictRequest(Request):
    """A request whose body is strict JSON."""

    async def json(self) -> Any:
        body = await self.body()
        return await run_in_threadpool(parse, body) if len(body) >= LARGE else parse(body)


class StrictRoute(APIRoute):
    """A route that reads `StrictRequest`s and knows its fields' names for hints."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        kind = getattr(field.field_info, "annotation", None) if field else None
        names = tuple(getattr(kind, "model_fields", ()))

        async def strict(given_request: Request) -> Response:
            request = StrictRequest(given_request.scope, given_request.receive)
            if names:
                given = request.headers.get("content-type", "application/json")
                if not _JSON.match(given):
                    raise ApiError(415, f"content-type: {given[:80]!r}, expected application/json")
                if not await request.body():
                    raise refused("body: empty, expected a JSON object")
                request.scope["lily.fields"] = names
            return await handle(request)

        return strict
