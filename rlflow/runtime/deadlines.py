"""Nothing waits forever: every wait of the driver goes through `within` or `or_hung`, with a name and a deadline."""

import asyncio
from collections.abc import Awaitable
from typing import Literal, TypeVar

from rlflow.config import DeadlinesConfig
from rlflow.errors import DeadlineError, WorkerHung

T = TypeVar("T")


async def within(
    stage: str, seconds: float, awaitable: Awaitable[T], hint: str = "", error: type[DeadlineError] = DeadlineError
) -> T:
    """The result of `awaitable`; an `error` naming `stage` when it takes longer than `seconds`.

    A TimeoutError from inside `awaitable` passes through unchanged.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise error(stage, seconds, hint) from None
        raise


async def or_hung(
    stage: str,
    deadlines: DeadlinesConfig,
    name: Literal["start_s", "train_s", "weights_s", "checkpoint_s"],
    awaitable: Awaitable[T],
) -> T:
    """The result of a call to what a run cannot do without; WorkerHung when it takes longer than that deadline."""
    seconds: float = getattr(deadlines, name)
    return await within(stage, seconds, awaitable, f"raise deadlines.{name} if it takes this long", WorkerHung)
