"""The episode runners: the actors that play, and how the driver sends them groups.

    GroupOrder -> the runner with the fewest groups -> PlayedGroup, and a handle to each episode's payload

The driver owns the payloads, so that they outlive the runner, and never opens them.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.experimental import get_local_object_locations

from rlflow.cluster.calls import answer, has_ended, wait_until_back
from rlflow.cluster.devices import Devices
from rlflow.cluster.pulse import watched
from rlflow.cluster.rewards import scorer_of
from rlflow.config import Config, ProcessKind
from rlflow.environments.find import is_silent
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, EnvironmentSpec, Program
from rlflow.errors import DeadlineError, WorkerError, WorkerLost
from rlflow.rollout.client import EngineHandle
from rlflow.rollout.fleet import TELL_S
from rlflow.rollout.gateway.server import Gateway
from rlflow.runtime.clock import as_seen_here, now
from rlflow.runtime.deadlines import within
from rlflow.types import EpisodePayload, GroupOrder, Message, PayloadRef, Pictures, PlayedGroup
from rlflow.workers.runner import EpisodeRunner

_WHO = "episode runner"


def start_runners(
    config: Config,
    model_path: str,
    spec: EnvironmentSpec,
    rewards: list[str],
    engines: list[str],
    devices: Devices,
    max_calls: int,
) -> list[Any]:
    """One actor on each machine with engines, at least, unless there are too few leases. `rewards` and `engines` are
    names of actors."""
    actor = watched(RunnerActor, config)
    options = {"max_concurrency": max_calls, "max_restarts": -1}
    places = devices.places(ProcessKind.runner)
    leases = leases_of_runners(spec.leases, len(places), config.algorithm.group_size)
    places = places[: len(leases)]
    return [
        actor.options(**options, **devices.of(ProcessKind.runner, index)).remote(
            f"episode runner {index}", config, model_path, spec.build, own, places.count(place), rewards, engines
        )
        for index, (own, place) in enumerate(zip(leases, places, strict=True))
    ]


def leases_of_runners(leases: Sequence[str], runners: int, group_size: int) -> list[Sequence[str]]:
    """The leases of each runner: enough for a whole group, even if that leaves fewer than `runners` runners.

    Example: for groups of 2 and 8 runners, (a, b, c, d, e) -> [(a, c, e), (b, d)]; without leases, 8 runners have none.
    """
    # One runner plays a whole group: with fewer leases its episodes would wait for each other, past deadlines.group_s.
    count = min(runners, max(1, len(leases) // group_size)) if leases else runners
    return [leases[index::count] for index in range(count)]


class RunnerActor(EpisodeRunner):
    """An episode runner that finds the other actors by name: Ray cannot restart an actor that was given handles."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        build: Callable[..., Environment | Program],
        leases: Sequence[str],
        num_runners: int,
        rewards: list[str],
        engines: list[str],
    ) -> None:
        """`num_runners` are on this machine, this one included."""
        found = [cast(EngineHandle, ray.get_actor(name)) for name in engines]
        self._pool = EnvironmentPool(
            build,
            config.env.processes,
            leases,
            lease_timeout_s=config.deadlines.group_s,
            num_runners=num_runners,
        )
        self._gateway = Gateway()
        self._starting = asyncio.Lock()
        self._is_started = False
        scorer = scorer_of(config, rewards, is_silent=is_silent(build))
        super().__init__(config, model_path, self._pool, scorer, *found, gateway=self._gateway)
        # Also after a restart: it waits until it is told who serves now.
        self._client.set_serving(())

    async def start(self) -> None:
        """Start what the episodes need. After a restart that is at the first group."""
        async with self._starting:
            if not self._is_started:
                await self._pool.start()
                await self._gateway.start()
                self._is_started = True

    async def play(  # pyright: ignore[reportIncompatibleMethodOverride]  one value more
        self, order: GroupOrder
    ) -> tuple[PlayedGroup | EpisodePayload | Pictures | None, ...]:
        """`EpisodeRunner.play`, and behind it the images."""
        await self.start()
        played, *payloads = await super().play(order)
        assert isinstance(played, PlayedGroup)
        pictures, played.pictures = cast("Pictures | None", played.pictures), None
        return (played, *payloads, pictures)

    async def close(self) -> None:
        await self._pool.close()
        await self._gateway.stop()

    async def linger(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()


class RayRunners:
    """Implements `roles.Runners`: each group goes to the runner with the fewest groups, of those that are there.

    A runner that died gets nothing until Ray has restarted it, on another machine if need be.
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
        asked_s = now()
        # One return value an episode, and one for the images of all.
        call = self._actors[index].play.options(num_returns=order.num_episodes + 2)
        try:
            group, *payloads, pictures = call.remote(order)
            played: PlayedGroup = await answer(_WHO, group, "play")
        except WorkerLost as error:
            if has_ended(error) and index not in self._returning:
                self._returning[index] = asyncio.create_task(self._return(index), name=f"return of {_WHO} {index}")
            raise
        finally:
            self._playing[index] -= 1
        played.payloads, played.pictures = payloads, pictures if played.num_images else None
        played.spans = as_seen_here(played.spans, asked_s)
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
        # If one dies, it has lost its groups: their own calls fail.
        stale = "which groups are too old"
        await asyncio.gather(*(tell(each, stale, each.cancel_stale.remote(oldest_version)) for each in self._actors))

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        actor = self._actors[await self._choose()]
        return await answer(_WHO, actor.transcript.remote(payload), "transcript")

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> str:
        actor = self._actors[await self._choose()]
        # Should it die meanwhile, it writes again when Ray has restarted it.
        return await answer(_WHO, actor.save_payloads.options(max_task_retries=-1).remote(path, *payloads), "save")

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]:
        # A first value beside the payloads keeps the number of return values above one, and tells success.
        call = self._actors[await self._choose()].load_payloads.options(num_returns=count + 1)
        done, *payloads = call.remote(path)
        await answer(_WHO, done, "load")
        return payloads

    async def _choose(self) -> int:
        """The runner with the fewest groups, of those that are there. Raises WorkerError when none will be."""
        there = await within(
            "waiting for an episode runner",
            self._patience_s,
            self._wait_until_one_is_there(),
            "they died, or took longer than deadlines.start_s to come back",
        )
        return min(there, key=lambda index: self._playing[index])

    async def _wait_until_one_is_there(self) -> list[int]:
        while not (there := [index for index in range(len(self._actors)) if index not in self._returning]):
            waits = [wait for wait in self._returning.values() if not wait.done()]
            if not waits:
                raise WorkerError("every episode runner is gone for good")
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return there

    async def _return(self, index: int) -> None:
        try:
            await wait_until_back(_WHO, self._actors[index])
        except WorkerError:
            return  # it is gone for good, and stays among those that are not there
        del self._returning[index]


async def tell(runner: Any, what: str, call: Any) -> None:
    """Wait until a runner has taken note of something, or has died. One that hangs is killed, and Ray restarts it."""
    try:
        await within(f"telling an {_WHO} {what}", TELL_S, answer(_WHO, call, what))
    except DeadlineError:
        ray.kill(runner, no_restart=False)
    except WorkerError:
        pass


def _is_error(payload: ray.ObjectRef) -> bool:
    """Whether what this machine holds is an error in place of the payload. A payload is mapped here, not copied."""
    try:
        ray.get(payload, timeout=0)
    except ObjectLostError:
        return True
    except GetTimeoutError:
        pass  # the payload is on this machine's disk
    return False
