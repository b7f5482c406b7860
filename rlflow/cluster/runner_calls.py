"""The episode runners, as the driver sees them: who is there, and what they have stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from ray.experimental import get_local_object_locations

from rlflow.cluster.calls import answer
from rlflow.errors import WorkerError, WorkerLost
from rlflow.runtime.deadlines import within
from rlflow.types import GroupOrder, Message, PayloadRef, PlayedGroup

_WHO = "episode runner"


class RayRunners:
    """Groups go to the episode runner that has the fewest, of those that are there.

    One that died gets nothing until Ray has restarted it, on another machine if need be.
    """

    def __init__(self, actors: Sequence[Any], *, on_one_machine: bool, patience_s: float) -> None:
        """`patience_s` is how long a group waits while no runner is there."""
        self._actors = actors
        self._on_one_machine = on_one_machine
        self._patience_s = patience_s
        self._playing = [0] * len(actors)
        self._returning: dict[int, asyncio.Task[None]] = {}
        """The runners that died, each with the wait for its return."""

    async def play(self, order: GroupOrder) -> PlayedGroup:
        index = await self._choose()
        self._playing[index] += 1
        # One return value an episode: the driver owns the payloads, so they outlive the runner, and never opens them.
        call = self._actors[index].play.options(num_returns=order.num_episodes + 1)
        try:
            group, *payloads = call.remote(order)
            played: PlayedGroup = await answer(_WHO, group, "play")
        except WorkerLost as error:
            self._miss(index, error)
            raise
        finally:
            self._playing[index] -= 1
        played.payloads = payloads
        return played

    def is_lost(self, payloads: Sequence[PayloadRef]) -> bool:
        if self._on_one_machine:
            return False  # the driver would be lost too
        handles = cast("list[ray.ObjectRef]", list(payloads))
        here = ray.get_runtime_context().get_node_id()
        found = get_local_object_locations(handles)
        # In place of what was stored on a lost machine, Ray stores an error on this one. What the driver holds in its
        # own memory, because it is small, is nowhere.
        return any(found[each]["node_ids"] == [here] and _is_error(each) for each in handles)

    async def cancel_stale(self, oldest_version: int) -> None:
        calls = [
            answer(_WHO, actor.cancel_stale.remote(oldest_version), "cancel stale groups") for actor in self._actors
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            # A runner that died has lost its groups: their own calls fail.
            if isinstance(result, BaseException) and not isinstance(result, WorkerError):
                raise result

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        actor = self._actors[await self._choose()]
        return await answer(_WHO, actor.transcript.remote(payload), "transcript")

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> None:
        actor = self._actors[await self._choose()]
        # Should it die meanwhile, it writes again when Ray has restarted it.
        await answer(_WHO, actor.save_payloads.options(max_task_retries=-1).remote(path, *payloads), "save")

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]:
        # A first value beside the payloads keeps the number of return values above one, and tells success.
        call = self._actors[await self._choose()].load_payloads.options(num_returns=count + 1)
        done, *payloads = call.remote(path)
        await answer(_WHO, done, "load")
        return payloads

    async def _choose(self) -> int:
        """The runner with the fewest groups, of those that are there. Raises WorkerError when none will be."""
        waiting = within(
            "waiting for an episode runner",
            self._patience_s,
            self._until_one_is_there(),
            "they died, or took longer than deadlines.start_s to come back",
        )
        there = await waiting
        return min(there, key=lambda index: self._playing[index])

    async def _until_one_is_there(self) -> list[int]:
        while not (there := [index for index in range(len(self._actors)) if index not in self._returning]):
            waits = [wait for wait in self._returning.values() if not wait.done()]
            if not waits:
                raise WorkerError("every episode runner is gone for good")
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return there

    def _miss(self, index: int, error: WorkerLost) -> None:
        if isinstance(error.__cause__, RayActorError) and index not in self._returning:
            self._returning[index] = asyncio.create_task(self._return(index), name=f"return of {_WHO} {index}")

    async def _return(self, index: int) -> None:
        try:
            # Retried, for a process that Ray is restarting does not answer yet.
            await answer(_WHO, self._actors[index].__ray_ready__.options(max_task_retries=-1).remote())
        except WorkerError:
            return  # for good, so that it stays among those that are not there
        del self._returning[index]


def _is_error(payload: ray.ObjectRef) -> bool:
    """Of a payload on this machine, which is mapped and not copied."""
    try:
        ray.get(payload, timeout=0)
    except ObjectLostError:
        return True
    except GetTimeoutError:
        return False  # on its disk
    return False
