"""One reply in the making: a worker thread draws it, the event loop hands it on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from lily.errors import Cancelled
from lily.server.failures import ApiError, failure, stopping
from lily.server.metrics import Metrics
from lily.server.queue import Admission

Progress = Callable[[int, int], None]


class Source(Protocol):
    """What a worker draws: a `lily.Reply` or `lily.Generation`."""

    def __iter__(self) -> Iterator[Any]: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted and its prompt is being computed."""


@dataclass(frozen=True, slots=True)
class Computed:
    """So much of the prompt is computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece of the reply."""

    piece: Any


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole reply; the last event.

    Attributes:
        result: a `lily.ReplyResult` or `lily.Result`.
        queued_s: seconds that the request waited for its turn.
    """

    result: Any
    queued_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more; the last event."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody reads this any more; the last event."""


Event = Started | Computed | Drawn | Finished | Failed | Gone


class Crew:
    """The worker threads, one for each reply that may run, and the work they have.

    Attributes:
        admission: who may run.
        metrics: what was counted.
    """

    def __init__(self, parallel: int, queue: int, metrics: Metrics) -> None:
        self.admission = Admission(parallel, queue)
        self.metrics = metrics
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="lily-reply")
        self._works: set[Work] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, draw: Callable[[Progress], Source]) -> Work:
        """Queue a reply that `draw(progress)` makes; it is cancelled when the client goes.

        Raises:
            ApiError: too many wait.
        """
        self.admission.check()
        work = Work(draw)
        watch = asyncio.create_task(_watch(request, work))
        task = asyncio.create_task(self._run(work, watch))
        for own in (watch, task):
            self._tasks.add(own)
            own.add_done_callback(self._tasks.discard)
        return work

    async def _run(self, work: Work, watch: asyncio.Task[None]) -> None:
        self._works.add(work)
        arrived = time.perf_counter()
        try:
            work.waits = asyncio.current_task()
            async with self.admission.place():
                work.waits = None
                queued_s = time.perf_counter() - arrived
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, work.run, loop, queued_s)
        except asyncio.CancelledError:
            work.push(Gone())
        except ApiError as error:
            work.push(Failed(error))
        finally:
            watch.cancel()
            self._works.discard(work)
            self.metrics.ended(work)

    async def close(self) -> None:
        """Cancel everything and wait for the threads."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()

    def stop(self) -> None:
        """Cancel everything and let nothing new begin."""
        self.admission.close()
        for work in list(self._works):
            work.stop()


class Work:
    """A reply's events, in order. Made by `Crew.begin`.

    Attributes:
        error, finished: how it ended, once it has.
        waits: the task that waits for a place, while it does.
    """

    def __init__(self, draw: Callable[[Progress], Source]) -> None:
        self._draw = draw
        # Without a bound: a reply that is drawn faster than it is read shall not hold its place
        # longer, and is no larger than the context.
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._source: Source | None = None
        self._cancelled = self._stopping = False
        self.waits: asyncio.Task[None] | None = None
        self.error: ApiError | None = None
        self.finished: Finished | None = None

    # On the event loop

    async def next(self, timeout: float) -> Event | None:
        """The next event; None after `timeout` seconds without one."""
        if self._events.empty():
            try:
                async with asyncio.timeout(timeout):
                    return await self._events.get()
            except TimeoutError:
                return None
        return self._events.get_nowait()

    def ready(self) -> Event | None:
        """The next event if it is there."""
        return None if self._events.empty() else self._events.get_nowait()

    def push(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.error = event.error
        if isinstance(event, Finished):
            self.finished = event
        self._events.put_nowait(event)

    def cancel(self) -> None:
        """The client has gone: end within a token, or a chunk of the prompt."""
        self._cancelled = True
        if self.waits is not None:
            self.waits.cancel()
        source = self._source
        if source is not None:
            with contextlib.suppress(ValueError):  # the session has just been closed
                source.cancel()

    def stop(self) -> None:
        """The server ends."""
        self._stopping = True
        if self.waits is None:
            self.cancel()

    # On a worker thread

    def run(self, loop: asyncio.AbstractEventLoop, queued_s: float) -> None:
        """Draw the reply and push its events to `loop`."""

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(self.push, event)

        def progress(done: int, total: int) -> None:
            if self._cancelled:
                raise Cancelled("the client has gone")
            tell(Computed(done, total))

        try:
            source = self._source = self._draw(progress)
            try:
                tell(Started())
                if not self._cancelled:
                    for piece in source:
                        tell(Drawn(piece))
                        if self._cancelled:
                            break
                source.close()
                last: Event = Finished(source.result(), queued_s)
                if self._cancelled:
                    last = Failed(stopping()) if self._stopping else Gone()
            finally:
                self._source = None
                source.close()
        except Exception as error:
            last = Failed(stopping() if self._stopping else failure(error))
        tell(last)


async def _watch(request: Request, work: Work) -> None:
    """Cancel `work` when the client goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    work.cancel()
