"""Nothing waits forever: every wait of the driver goes through `within`, with a name and a deadline."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rlflow.errors import DeadlineError

T = TypeVar("T")


async def within(stage: str, seconds: float, awaitable: Awaitable[T], hint: str = "") -> T:
    """The result of `awaitable`; DeadlineError naming `stage` when it takes longer than `seconds`.

    A TimeoutError from inside `awaitable` passes through unchanged.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise DeadlineError(stage, seconds, hint) from None
        raise
