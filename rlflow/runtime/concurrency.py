"""Several coroutines, one outcome."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
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


async def until_enough(
    coroutines: Sequence[Coroutine[Any, Any, T]], is_enough: Callable[[Mapping[int, T]], bool]
) -> list[T | None]:
    """Results in order, None for those that were cancelled because `is_enough` said yes to the others, by their places.

    When one fails, or the wait is cancelled, the others are cancelled and waited for first.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    waiting = set(tasks)
    try:
        while waiting and not any(task.exception() for task in tasks if task.done()):
            if is_enough({place: task.result() for place, task in enumerate(tasks) if task.done()}):
                break
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [None if task.cancelled() else task.result() for task in tasks]


async def wait_until_all_ended(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order, or the first failure; either way only when every one of them has ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
