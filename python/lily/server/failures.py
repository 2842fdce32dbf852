"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lily.errors import Cancelled, CheckpointError, ContextError, DeviceError, Error

log = logging.getLogger("lily.server")

RETRY_S = 2
"""Seconds after which a refused client may ask again."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]-]*)[:,] ")
# Names of arguments, and of the fields that they come from.
_RENAMED = (
    ("format:", "response_format:"),
    ("bias:", "logit_bias:"),
    ("chat template:", "messages:"),
)
_CLOSED = ("the model is closed", "the session is closed")


class ApiError(HTTPException):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence without a final period.
        param: the request's field that is to blame.
        code: a word for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        other = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {
            "error": {
                "message": self.detail,
                "type": _KINDS.get(self.status_code, other),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400; without `param`, the field is the one that `message` begins with."""
    if param is None and (match := _FIELD.match(message)):
        param = match[1]
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    """A 503 that says when to try again."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(RETRY_S)})


def stopping() -> ApiError:
    """A 503 for what comes, or still runs, while the server ends."""
    return busy("the server is stopping")


def failure(error: BaseException) -> ApiError:
    """What a client is told of an exception."""
    text, _, hint = str(error).partition("\nhint: ")
    for own, asked in _RENAMED:
        if text.startswith(own):
            text = asked + text.removeprefix(own)
    match error:
        case ApiError():
            return error
        case ContextError():
            return refused(text, code="context_length_exceeded")
        case ValueError() if text in _CLOSED:
            return stopping()
        case ValueError():
            return refused(text)
        case CheckpointError():
            return ApiError(400, text)
        case Error() if hint.startswith("pip install"):
            return ApiError(501, f"{text}, {hint}", code="not_installed")
        case Cancelled():
            return stopping()
        case MemoryError():
            return busy("out of memory")
    log.error("a request failed", exc_info=error)
    if isinstance(error, DeviceError):
        return ApiError(500, text, code="device_error")
    return ApiError(500, f"unexpected {type(error).__name__}; the server's log says more")


def invalid(errors: Sequence[Mapping[str, Any]], known: Iterable[str]) -> ApiError:
    """A 400 for the first field that does not fit its description."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    name = _path(path[:1])
    kind = first["type"]
    if not path:
        return refused("body: expected a JSON object", "body")
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        name = _path(path)
        return refused(f"{name[:80]}: unknown option{hint}", name[:80], "unknown_parameter")
    if kind == "missing":
        return refused(f"{_path(path)}: missing", _path(path), "missing_parameter")
    same = [error for error in errors if error["loc"][: 1 + len(path[:1])] == first["loc"][:2]]
    wanted = " or ".join(dict.fromkeys(_wanted(error["msg"]) for error in same))
    return refused(f"{name}: {_shown(first.get('input'))}, expected {wanted}", name)


def _path(parts: Sequence[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _wanted(message: str) -> str:
    for start in ("Input should be ", "Value error, ", "Assertion failed, "):
        message = message.removeprefix(start)
    return message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def add_handlers(app: FastAPI) -> None:
    """Let every error leave `app` in that form."""

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fields = request.scope.get("lily.fields", ())
        return invalid(error.errors(), fields).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if not isinstance(error, ApiError):
            where = f"{request.method} {request.url.path[:200]}"
            error = ApiError(error.status_code, f"{where}: {error.detail}", headers=error.headers)
        return error.response()

    async def on_other(_: Request, error: Exception) -> JSONResponse:
        return failure(error).response()

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ValueError, Error, MemoryError):
        app.add_exception_handler(kind, on_other)
    app.add_exception_handler(Exception, on_other)
