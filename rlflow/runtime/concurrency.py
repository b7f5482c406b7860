"""Several coroutines, one outcome."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one fails, or the wait is cancelled, the others are cancelled and waited for first.

    Unlike with `asyncio.gather`, a cancellation is never lost to a failure at the same moment.
    """
    if not coroutines:
        return []
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
    return [task.result() for task in failed or tasks]


async def wait_until_all_ended(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order, or the first failure; either way only when every one of them has ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
