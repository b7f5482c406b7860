"""Several coroutines, one outcome."""

from __future__ import annotations

import asyncio

import pytest

from rlflow.runtime.concurrency import all_or_none, wait_until_all_ended


async def value(number: int) -> int:
    for _ in range(number):
        await asyncio.sleep(0)
    return number


async def test_results_come_in_order() -> None:
    assert await all_or_none([value(3), value(1), value(2)]) == [3, 1, 2]
    assert await all_or_none([]) == []


async def test_a_failure_ends_the_others_first() -> None:
    ended: list[str] = []

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleanly")
        return 0

    async def fail() -> int:
        await asyncio.sleep(0)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await all_or_none([wait(), fail(), value(1)])
    assert ended == ["cleanly"]


async def test_a_cancellation_is_not_lost_to_a_failure_at_the_same_moment() -> None:
    broken = asyncio.get_running_loop().create_future()

    async def forever() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        await broken

    waiting = asyncio.create_task(all_or_none([forever(), fail()]))
    await value(3)
    broken.set_exception(KeyError("lost"))
    await asyncio.sleep(0)  # the coroutine has failed, and nobody knows yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_failure_waits_for_the_others_to_end() -> None:
    ended: list[str] = []

    async def work() -> int:
        await value(5)
        ended.append("work")
        return 1

    async def fail() -> int:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await wait_until_all_ended([work(), fail()])
    assert ended == ["work"]
    assert await wait_until_all_ended([value(3), value(1)]) == [3, 1]
