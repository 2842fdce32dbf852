"""Blocking work awaited from an event loop: each run of pieces has a thread of its own.

asyncio is imported where it is used, since it loads the network modules.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from lily.errors import Error

P = TypeVar("P")
T = TypeVar("T")

_END = object()


async def in_thread(
    work: Callable[[], T],
    cancel: Callable[[], None] = lambda: None,
    threads: ThreadPoolExecutor | None = None,
) -> T:
    """The result of `work`, done in another thread while the loop goes on.

    If the awaiting task is cancelled, `cancel` is called and `work` is left to end; only then does
    the task see its cancellation.
    """
    import asyncio

    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel()
        with contextlib.suppress(Exception):
            await future
        raise


class Pieces(ABC, Generic[P]):
    """An iterator of pieces for `for` and for `async for`, which never blocks the loop.

    Cancelling the task that awaits a piece, and leaving an `async with`, stop the work as `close`
    does; so does dropping the iterator. One thread or task iterates at a time.
    """

    _run: Iterator[P]
    # A generator knows its owner by `weakref.proxy`: a cycle would keep the session of an iterator
    # that was dropped until the garbage collector comes.
    _thread: ThreadPoolExecutor | None = None

    def __next__(self) -> P:
        self._check_at_rest()
        return next(self._run)

    def _check_at_rest(self) -> None:
        """Raise ValueError while another thread waits for a piece."""
        if getattr(self._run, "gi_running", False):
            raise ValueError("reply: another thread is reading it, expected one at rest")

    def _end(self) -> None:
        """Give no more pieces."""
        self._check_at_rest()
        self._run.close()  # type: ignore[attr-defined]

    @abstractmethod
    def cancel(self) -> None:
        """Stop from any thread: within a token, or within a chunk of the prompt."""

    @abstractmethod
    def close(self) -> None:
        """Stop, if it still runs."""

    def __iter__(self) -> Self:
        return self

    def __del__(self) -> None:
        if hasattr(self, "_run"):
            with contextlib.suppress(Error):  # a step that failed: the session will say so
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ipython_display_(self) -> None:
        from lily.notebook import show

        show(self)  # type: ignore[arg-type]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> P:
        piece = await self._await(lambda: next(self, _END))
        if piece is _END:
            self._let_go()
            raise StopAsyncIteration
        return piece  # type: ignore[return-value]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """As `close`, without blocking the loop."""
        self.cancel()
        await self._await(self.close)
        self._let_go()

    async def _await(self, work: Callable[[], T]) -> T:
        import asyncio

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lily")
        try:
            return await in_thread(work, self.cancel, self._thread)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self.close)))
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
