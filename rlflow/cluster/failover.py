"""The loss of a process without which a run cannot go on: noticing it, and ending what is left of the fleet."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlflow.cluster.calls import wait_until_ended
from rlflow.cluster.start import Fleet
from rlflow.errors import PayloadLost, WorkerError, WorkerLost

T = TypeVar("T")

NOTICE_S = 60.0
"""Seconds that Ray may need to notice that a machine is gone. The other ranks of the trainer notice earlier, because a
connection breaks."""


async def run_unless_lost(fleet: Fleet, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.

    Raises WorkerLost, with the fleet and the work ended, when a process of `fleet.vital` is lost before. A PayloadLost
    of the work is raised as it is, with the fleet ended too.
    """
    working = asyncio.create_task(work)
    watching = [asyncio.create_task(wait_until_ended(name, actor)) for name, actor in fleet.vital.items()]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        error = working.exception() if working.done() else None
        if working.done() and error is None:
            return working.result()
        is_lost = isinstance(error, WorkerLost | PayloadLost)
        if isinstance(error, WorkerError) and not is_lost and fleet.is_joined:
            await asyncio.wait(watching, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        ended = [watch for watch in watching if watch.done()]
        if ended or is_lost:
            await fleet.end()  # before the work, so that nothing that it waits for is still to come
        return ended[0].result() if ended else working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.wait((working, *watching))
