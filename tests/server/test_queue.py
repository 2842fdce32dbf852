"""Who may run, who waits, who is refused."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lily.server.failures import ApiError
from lily.server.queue import Admission
from server.running import running
from server.scripted import ScriptedModel, piece, prefill, wait_for
from server.test_streams import until


def test_a_full_queue_is_refused_with_a_hint_when_to_retry() -> None:
    go = threading.Event()
    model = ScriptedModel([wait_for(go), piece("done")])
    with running(model, parallel=2, queue=1) as server, ThreadPoolExecutor() as pool:
        first = [pool.submit(server.chat) for _ in range(3)]
        until(lambda: server.client.get("/health").json()["waiting"] == 1)
        refused = server.chat()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "overloaded"
        assert server.client.get("/health").json()["running"] == 2
        go.set()
        assert [reply.result().status_code for reply in first] == [200] * 3
        assert server.idle()


def test_a_short_reply_is_done_beside_a_long_prompt() -> None:
    go = threading.Event()

    def steps(call: dict[str, Any]) -> list[Any]:
        long = call["messages"][0]["content"] == "long"
        return [prefill(10, go), piece("long")] if long else [piece("short")]

    with running(ScriptedModel(steps), parallel=2) as server, ThreadPoolExecutor() as pool:
        long = pool.submit(server.chat, "long")
        until(lambda: server.client.get("/health").json()["running"] == 1)
        short = server.chat("short").json()
        assert short["choices"][0]["message"]["content"] == "short"
        assert not long.done()
        go.set()
        assert long.result().status_code == 200


def test_a_client_that_goes_leaves_the_queue() -> None:
    go = threading.Event()
    model = ScriptedModel([wait_for(go), piece("done")])
    with running(model, parallel=1) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        until(lambda: server.client.get("/health").json()["running"] == 1)
        with server.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}], "stream": True},
        ) as waiting:
            assert waiting.status_code == 200, "headers come although it waits"
            assert server.client.get("/health").json()["waiting"] == 1
        until(lambda: server.client.get("/health").json()["waiting"] == 0)
        go.set()
        assert first.result().status_code == 200
        assert len(model.calls) == 1


def test_places_are_handed_on_in_order_and_none_is_lost() -> None:
    async def play() -> list[int]:
        admission = Admission(parallel=1, queue=10)
        order: list[int] = []

        async def take(n: int) -> None:
            async with admission.place():
                order.append(n)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(take(n)) for n in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.running == admission.waiting == 0
        return order

    assert asyncio.run(play()) == [0, 1, 3, 5]


def test_whoever_is_cancelled_while_being_given_a_place_hands_it_on() -> None:
    async def play() -> None:
        admission = Admission(parallel=1, queue=10)

        async def take() -> None:
            async with admission.place():
                pass

        async with admission.place():
            second, third = asyncio.create_task(take()), asyncio.create_task(take())
            await asyncio.sleep(0)
        second.cancel()  # its turn has come, but it has not run since
        await third
        assert second.cancelled() or second.cancelling()
        assert admission.running == admission.waiting == 0

    asyncio.run(play())


def test_nobody_gets_in_once_it_is_closed() -> None:
    async def play() -> None:
        admission = Admission(parallel=1, queue=10)
        async with admission.place():
            waits = asyncio.create_task(admission.place().__aenter__())
            await asyncio.sleep(0)
            admission.close()
            for late in (waits, admission.place().__aenter__()):
                with pytest.raises(ApiError) as error:
                    await late
                assert error.value.status_code == 503
        assert admission.running == 0

    asyncio.run(play())
