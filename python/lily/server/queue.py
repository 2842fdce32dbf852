"""Admission: how many replies run at once, and who is next."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from lily.server.failures import busy, stopping


class Admission:
    """Places for replies. At most `parallel` are taken; whoever comes later waits, first come first
    served, and at most `queue` wait.

    Replies that run take turns on the device, one chunk of a prompt or one token at a time, so a
    short one is not held up by a long prompt beside it. Belongs to one event loop.

    Attributes:
        running: places taken.
    """

    def __init__(self, parallel: int, queue: int) -> None:
        self._parallel = parallel
        self._queue = queue
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def check(self) -> None:
        """Refuse what could not even wait.

        Raises:
            ApiError: the queue is full, or the server is stopping.
        """
        if self._closed:
            raise stopping()
        if self.running >= self._parallel and self.waiting >= self._queue:
            raise busy(
                f"{self.running} replies run and {self.waiting} requests wait, the most there may"
            )

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place, as soon as it is this request's turn.

        Raises:
            ApiError: as `check` does, or the server stopped meanwhile.
        """
        self.check()
        if self.running < self._parallel:
            self.running += 1
        else:
            await self._turn()
        try:
            yield
        finally:
            self._leave()

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # was given the place and cannot take it
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)

    def _leave(self) -> None:
        """Hand the place to who has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def close(self) -> None:
        """Refuse whoever waits or comes."""
        self._closed = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(stopping())
