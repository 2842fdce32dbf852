"""Server-sent events, and the two ways of answering with a reply's events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lily.server.failures import failure
from lily.server.work import Computed, Drawn, Event, Failed, Finished, Gone, Started, Work

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
GRACE_S = 1.0
"""How long a stream waits for its first piece before its headers go out: until then, a refusal or a
failure can still be a status."""

EVENTS = "text/event-stream"
WHOLE_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole reply, or with `stream` its events.",
        "content": {EVENTS: {"schema": {"type": "string"}}},
    }
}
"""What a route that may stream says of its answer, beside JSON."""


def event(data: Mapping[str, Any]) -> bytes:
    """`data` as one event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class Writer(Protocol):
    """Puts a reply into the objects of one API."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""

    def computed(self, done: int, total: int) -> list[dict[str, Any]]:
        """Chunks for a piece of the prompt that is computed."""

    def drawn(self, piece: Any) -> list[dict[str, Any]]:
        """Chunks for a piece of the reply."""

    def closing(self, done: Finished) -> list[dict[str, Any]]:
        """Chunks after the last piece."""

    def whole(self, done: Finished) -> dict[str, Any]:
        """The reply in one object."""


async def answer(work: Work, writer: Writer, stream: bool, keep_alive_s: float) -> Response:
    """The response to a request, once it is known whether it is accepted.

    Raises:
        ApiError: it is not, or fails before anything was sent.
    """
    try:
        if not stream:
            return await _buffered(work, writer, keep_alive_s)
        return EventStream(work, writer, keep_alive_s, await _begun(work))
    except BaseException:
        work.cancel()
        raise


async def _begun(work: Work) -> list[Event]:
    """The events until the first piece of the reply, or until nobody should wait any longer."""
    events: list[Event] = []
    end = time.monotonic() + GRACE_S
    while (left_s := end - time.monotonic()) > 0 and (event := await work.next(left_s)) is not None:
        if isinstance(event, Failed):
            raise event.error
        events.append(event)
        if not isinstance(event, Started | Computed):
            break
    return events


async def _buffered(work: Work, writer: Writer, wait_s: float) -> Response:
    while True:
        match await work.next(wait_s):
            case Finished() as done:
                return JSONResponse(writer.whole(done))
            case Failed(error):
                raise error
            case Gone():
                return Response(status_code=499)


class EventStream(Response):
    """A reply as server-sent events, with a comment wherever it would be silent for long."""

    def __init__(self, work: Work, writer: Writer, keep_alive_s: float, begun: list[Event]) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=EVENTS,
        )
        del self.headers["content-length"]
        self._work = work
        self._writer = writer
        self._keep_alive_s = keep_alive_s
        self._begun = begun
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._chunks():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._work.cancel()

    async def _chunks(self) -> AsyncIterator[bytes]:
        """What to send: all that is ready at a time, and a comment where nothing was for long."""
        yield b"".join(map(self._data, self._begun)) or KEEP_ALIVE
        sent_at = time.monotonic()
        while not self._ended:
            left_s = sent_at + self._keep_alive_s - time.monotonic()
            data, now = b"", await self._work.next(max(0.0, left_s))
            while now is not None:
                data += self._data(now)
                now = None if self._ended else self._work.ready()
            if data or time.monotonic() - sent_at >= self._keep_alive_s:
                yield data or KEEP_ALIVE
                sent_at = time.monotonic()

    def _data(self, now: Event) -> bytes:
        try:
            return self._encoded(now)
        except Exception as error:  # headers are out: the client must learn it here
            self._ended = True
            return event(failure(error).body()) + DONE

    def _encoded(self, now: Event) -> bytes:
        writer = self._writer
        self._ended = isinstance(now, Finished | Failed | Gone)
        match now:
            case Started():
                return b"".join(map(event, writer.opening()))
            case Computed(done, total):
                return b"".join(map(event, writer.computed(done, total)))
            case Drawn(piece):
                return b"".join(map(event, writer.drawn(piece)))
            case Finished():
                return b"".join(map(event, writer.closing(now))) + DONE
            case Failed(error):
                return event(error.body()) + DONE
            case _:
                return b""
