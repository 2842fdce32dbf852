"""The same pieces for `async for`, and an event loop that is never held up."""

import asyncio
import gc
import threading
import time

import pytest

import lily
from lily.asynchronous import Pieces, in_thread

GREEDY = lily.Sampling.greedy()
PROMPT = [3, 1, 4, 1, 5]


async def _texts(generation: lily.Generation) -> list[int | None]:
    return [piece.token async for piece in generation]


def test_async_for_gives_what_for_gives(tiny):
    want = [p.token for p in tiny.generate(PROMPT, max_tokens=9, sampling=GREEDY)]
    assert asyncio.run(_texts(tiny.generate(PROMPT, max_tokens=9, sampling=GREEDY))) == want


def test_a_sync_call_works_inside_a_running_loop(tiny):
    async def main():
        return tiny.generate(PROMPT, max_tokens=5, sampling=GREEDY).result().tokens

    assert (
        asyncio.run(main()) == tiny.generate(PROMPT, max_tokens=5, sampling=GREEDY).result().tokens
    )


def test_tasks_draw_at_the_same_time_and_do_not_mix(tiny):
    prompts = [[7] * 5, [8] * 50, [9] * 90, [10] * 17]

    async def main():
        replies = [tiny.generate(p, max_tokens=12, sampling=GREEDY).aresult() for p in prompts]
        return await asyncio.gather(*replies)

    for prompt, result in zip(prompts, asyncio.run(main()), strict=True):
        assert (
            result.tokens == tiny.generate(prompt, max_tokens=12, sampling=GREEDY).result().tokens
        )


def test_cancelling_the_task_stops_the_generation_and_leaves_the_session_usable(tiny):
    session = tiny.session()
    generation = session.generate(PROMPT, sampling=GREEDY)
    drawn = []

    async def draw():
        async for piece in generation:
            drawn.append(piece.token)  # noqa: PERF401

    async def main():
        task = asyncio.create_task(draw())
        while len(drawn) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert generation.finish_reason == "cancelled"
    assert [*session.tokens, session.pending] == PROMPT + list(generation.result().tokens)
    want = tiny.generate(PROMPT, max_tokens=6, sampling=GREEDY).result().tokens
    assert session.generate(PROMPT, max_tokens=6, sampling=GREEDY).result().tokens == want


def test_cancelling_during_the_prompt_stops_between_chunks(tiny):
    seen = threading.Event()
    generation = tiny.session().generate(
        [5] * 3000, sampling=GREEDY, progress=lambda done, total: seen.set()
    )

    async def main():
        task = asyncio.create_task(generation.aresult())
        while not seen.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert generation.finish_reason == "cancelled"
    assert generation.session.position < 3000


def test_leaving_an_async_with_stops(tiny):
    async def main():
        async with tiny.generate(PROMPT, sampling=GREEDY) as generation:
            async for _ in generation:
                break
        return generation

    generation = asyncio.run(main())
    assert generation.finish_reason == "cancelled"
    assert generation._thread is None


def test_the_loop_goes_on_while_a_piece_is_awaited():
    class Slow(Pieces[int]):
        gate = threading.Event()

        def __next__(self) -> int:
            self.gate.wait(10)
            raise StopIteration

        def cancel(self) -> None:
            self.gate.set()

        def close(self) -> None:
            pass

    async def main():
        slow = Slow()
        task = asyncio.create_task(anext(slow, None))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        slow.gate.set()
        return await task

    assert asyncio.run(main()) is None


def test_an_error_reaches_the_task_that_awaits():
    async def main():
        await in_thread(lambda: [][0], lambda: None)

    with pytest.raises(IndexError):
        asyncio.run(main())


def test_a_generation_that_was_cancelled_before_it_began_computes_nothing(tiny):
    session = tiny.session()
    generation = session.generate(PROMPT, sampling=GREEDY)
    generation.cancel()
    assert generation.result().finish_reason == "cancelled"
    assert session.position == 0


def test_what_was_left_behind_gives_its_session_back_at_once(tiny):
    gc.collect()
    before = len(tiny._sessions)
    gc.disable()
    try:
        for _ in range(3):
            tiny.generate(PROMPT)
            for _ in tiny.generate(PROMPT, sampling=GREEDY):
                break
        assert len(tiny._sessions) == before
    finally:
        gc.enable()


def test_closing_what_never_began_closes_the_session_made_for_it(tiny):
    with tiny.generate(PROMPT) as generation:
        pass
    assert repr(generation.session) == "Session(closed)"
    assert generation.result().finish_reason == "cancelled"


def test_a_finished_generation_cancels_no_other_of_its_session(tiny):
    session = tiny.session()
    first = session.generate(PROMPT, max_tokens=2, sampling=GREEDY)
    first.result()
    second = session.generate(PROMPT, max_tokens=5, sampling=GREEDY)
    next(second)
    first.cancel()
    assert second.result().finish_reason == "length"


def test_cancelling_the_task_stops_a_load():
    begun, stopped = threading.Event(), threading.Event()

    class Slow(lily.Model):
        @classmethod
        def load(cls, source, *, progress):
            try:
                for done in range(1000):
                    progress("load", done, 1000)
                    begun.set()
                    time.sleep(0.01)
            except lily.Cancelled:
                stopped.set()
                raise

    async def main():
        task = asyncio.create_task(Slow.aload("somewhere"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert stopped.is_set()


def test_reading_or_closing_what_is_being_read_is_refused(tiny):
    said = []

    def progress(done, total):
        if said:
            return
        for call in (lambda: next(generation), generation.close):
            with pytest.raises(ValueError, match="another thread is reading it") as error:
                call()
            said.append(error)

    generation = tiny.generate(PROMPT, max_tokens=2, sampling=GREEDY, progress=progress)
    assert generation.result().finish_reason == "length"
    assert len(said) == 2


def test_a_generation_that_another_has_replaced_does_not_cancel_it(tiny):
    session = tiny.session()
    old = session.generate(PROMPT, sampling=GREEDY)
    idle = session.generate(PROMPT, sampling=GREEDY)
    next(old)
    new = session.generate([*PROMPT, 9], max_tokens=6, sampling=GREEDY)
    next(new)
    old.cancel()
    idle.cancel()
    assert new.result().finish_reason == "length"
    assert next(old).token is None
    assert (old.finish_reason, idle.result().finish_reason) == ("cancelled", "cancelled")
