"""Processes without which a run cannot go on: how their loss is noticed, and how what is left of a fleet is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import ray

from rlflow.cluster.calls import wait_until_ended
from rlflow.errors import PayloadLost, WorkerError, WorkerLost

if TYPE_CHECKING:
    from rlflow.cluster.start import Fleet

T = TypeVar("T")

NOTICE_S = 60.0
"""For Ray to notice that a machine is gone. Other ranks of the trainer notice earlier, by a connection that broke."""


async def unless_lost(fleet: Fleet, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.

    Raises WorkerLost, with the fleet and the work ended, when a process of `fleet.vital` is lost before; a PayloadLost
    of the work is raised as it is, with the fleet ended too.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_first_lost(fleet))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        error = working.exception() if working.done() else None
        if working.done() and error is None:
            return working.result()
        is_lost = isinstance(error, WorkerLost | PayloadLost)
        if isinstance(error, WorkerError) and not is_lost and fleet.is_joined:
            await asyncio.wait((watching,), timeout=NOTICE_S)
        if watching.done() or is_lost:
            await end_fleet(fleet)  # before the work, so that nothing that it waits for is still to come
        return watching.result() if watching.done() else working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def _first_lost(fleet: Fleet) -> NoReturn:
    """Wait until the first of the processes that are vital ends; raises WorkerLost."""
    ends = [asyncio.create_task(wait_until_ended(name, actor)) for name, actor in fleet.vital.items()]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        next(iter(done)).result()
        raise AssertionError("the wait for the end of a process ends with an error")
    finally:
        for end in ends:
            end.cancel()


async def end_fleet(fleet: Fleet) -> None:
    """Kill all processes of a fleet, and give back what was reserved for them."""
    await fleet.membership.close()
    await fleet.engine_fleet.close()
    for actor in fleet.actors:
        ray.kill(actor)
    fleet.devices.release()
