"""Several coroutines, one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one fails, or the wait is cancelled, the others are cancelled and waited for first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
