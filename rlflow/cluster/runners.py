"""The actors that play episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray

from rlflow.cluster.devices import Devices
from rlflow.cluster.rewards import scorer_of
from rlflow.cluster.slots import num_runners
from rlflow.config import Config, Process
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, EnvironmentSpec, Program
from rlflow.rollout.client import EngineHandle
from rlflow.rollout.gateway.server import Gateway
from rlflow.types import EpisodePayload, GroupOrder, PlayedGroup
from rlflow.workers.runner import EpisodeRunner


def start_runners(
    config: Config,
    model_path: str,
    spec: EnvironmentSpec,
    rewards: list[str],
    engines: list[str],
    devices: Devices,
    max_calls: int,
) -> list[Any]:
    """One actor for every few engines. `rewards` and `engines` are names of actors."""
    actor: Any = ray.remote(RunnerActor)
    options = {"max_concurrency": max_calls, "max_restarts": -1}
    return [
        actor.options(**options, **devices.of(Process.runner, index)).remote(
            config, model_path, spec.build, leases, rewards, engines
        )
        for index, leases in enumerate(shares_of(spec.leases, num_runners(config)))
    ]


def shares_of(leases: Sequence[str], runners: int) -> list[Sequence[str]]:
    """The leases of each of `runners` runners, or of fewer where there are fewer leases.

    Example: shares_of(("a", "b", "c"), 2) == [("a", "c"), ("b",)]; shares_of((), 2) == [(), ()]
    """
    count = min(runners, len(leases)) or runners
    return [leases[index::count] for index in range(count)]


class RunnerActor(EpisodeRunner):
    """An episode runner that finds the other actors by name: Ray cannot restart an actor that was given handles."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        build: Callable[..., Environment | Program],
        leases: Sequence[str],
        rewards: list[str],
        engines: list[str],
    ) -> None:
        found = [cast(EngineHandle, ray.get_actor(name)) for name in engines]
        self._pool = EnvironmentPool(build, config.env.processes, leases, lease_timeout_s=config.deadlines.group_s)
        self._gateway = Gateway()
        self._starting = asyncio.Lock()
        self._is_started = False
        super().__init__(config, model_path, self._pool, scorer_of(config, rewards), *found, gateway=self._gateway)
        # Also after a restart: it waits until it is told who serves now.
        self._client.set_serving(())

    async def start(self) -> None:
        """Start what the episodes need. After a restart that is at the first group."""
        async with self._starting:
            if not self._is_started:
                await self._pool.start()
                await self._gateway.start()
                self._is_started = True

    async def play(self, order: GroupOrder) -> tuple[PlayedGroup | EpisodePayload, ...]:
        await self.start()
        return await super().play(order)

    async def close(self) -> None:
        await self._pool.close()
        await self._gateway.stop()

    async def linger(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()
