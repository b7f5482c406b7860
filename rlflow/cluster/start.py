"""Starts Ray and the actors of one run, and ends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import ray

from rlflow.algorithms.registry import needs_critic
from rlflow.cluster.calls import DISK, WATCH, RayReference, RayTrainer, answer, open_calls
from rlflow.cluster.critic import RayActorCritic
from rlflow.cluster.devices import Devices
from rlflow.cluster.engines import EngineActor, Membership, RayEngine
from rlflow.cluster.joined_ray import join_ray
from rlflow.cluster.loss import end_fleet
from rlflow.cluster.ray import private_ray
from rlflow.cluster.rewards import start_rewards
from rlflow.cluster.runner_calls import RayRunners
from rlflow.cluster.runners import start_runners
from rlflow.cluster.shared_files import check_shared_files
from rlflow.config import Config, Placement, Process, needs_reference, object_store_bytes, refers_to_itself
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError
from rlflow.roles import Trainer, Workers
from rlflow.rollout.fleet import EngineFleet
from rlflow.runtime.deadlines import within
from rlflow.runtime.environment import ONE_ARENA
from rlflow.workers.reference import ReferenceWorker
from rlflow.workers.trainer.actor import TrainerWorker

MANY_CALLS = 4096
"""Calls that an asynchronous actor may have open; the admission budget bounds them long before."""


_EVERYWHERE = {
    # Without this Ray hides every GPU from actors that ask for none and warns about it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would print a line every few seconds while one waits for an actor that it is restarting.
    "RAY_enable_output_error_log_if_still_retry": "0",
}
"""Settings of Ray for the driver and all actors."""


@dataclass(kw_only=True, slots=True)
class Fleet:
    """Everything that was started."""

    workers: Workers
    runners: list[Any]
    engines: list[Any]
    engine_fleet: EngineFleet
    membership: Membership
    trainers: list[Any]
    rewards: list[Any]
    reference: Any | None
    vital: dict[str, Any]
    """Name -> actor that Ray does not restart: what it holds is in checkpoints only."""
    devices: Devices
    is_joined: bool
    """Whether the cluster has other machines, which may be lost."""

    @property
    def actors(self) -> list[Any]:
        return [*self.engines, *self.runners, *self.rewards, *self.vital.values()]


@contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """Join `cluster.address`, or start Ray on this machine for as long as the block lasts."""
    if ray.is_initialized():
        raise ConfigError("Ray is already running in this process; start rlflow in a process of its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A group that ends in an error has one in each of its payloads too, which nobody reads; Ray would print them all.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    for name, value in _EVERYWHERE.items():
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        if config.cluster.address is not None:
            # The processes of a cluster that is there do not have this process's environment.
            join_ray(config.cluster.address, **quiet, runtime_env={"env_vars": _EVERYWHERE})
        else:
            ray.init(object_store_memory=object_store_bytes(config), **quiet, **stack.enter_context(private_ray()))
        stack.callback(ray.shutdown)
        yield


async def start_fleet(
    config: Config,
    model_path: str,
    spec: EnvironmentSpec,
    alarm: Callable[[str], None],
    reward_model_path: str | None = None,
    *,
    is_restart: bool = False,
) -> Fleet:
    """Create every actor at once and wait until all of them are ready.

    `reward_model_path` is the folder of `reward.model`, which scores in place of a function.
    `alarm` is given what people should know of later: an engine that was lost.
    After a loss (`is_restart`) there may be fewer machines than cluster.pools says.
    """
    devices = Devices(config, is_restart=is_restart)
    config = devices.config
    await devices.reserve()
    if machines := devices.machines():
        await check_shared_files(config, machines, model_path, reward_model_path)
    threads = config.cluster.cpu_threads or _threads(config)
    engine_names = [f"engine {index}" for index in range(config.rollout.engines)]
    engines = [
        ray.remote(EngineActor)
        .options(name=name, max_concurrency=MANY_CALLS, max_restarts=-1, **devices.of(Process.engine, index))
        .remote(config, model_path, index, threads)
        for index, name in enumerate(engine_names)
    ]
    num_ranks = config.trainer.ranks
    # Beside the writes, all calls come on one thread, though not the main one: torch's and CUDA's settings of it hold.
    environment = {"env_vars": ONE_ARENA}
    trainer_actor = cast(Any, ray.remote)(concurrency_groups={DISK: 1, WATCH: 1}, runtime_env=environment)(
        TrainerWorker
    )
    trainers = [
        trainer_actor.options(**devices.of(Process.trainer, rank)).remote(config, model_path, rank, num_ranks, threads)
        for rank in range(num_ranks)
    ]
    critics = [
        trainer_actor.options(**devices.of(Process.critic, rank)).remote(
            config, model_path, rank, num_ranks, threads, is_critic=True
        )
        for rank in range(num_ranks if needs_critic(config.algorithm) else 0)
    ]
    rewards = start_rewards(config, spec.reward, reward_model_path, devices, threads, MANY_CALLS)
    runners = start_runners(config, model_path, spec, list(rewards), engine_names, devices, MANY_CALLS)
    reference = None
    if needs_reference(config):
        reference_actor = cast(Any, ray.remote)(concurrency_groups={WATCH: 1})(ReferenceWorker)
        options = devices.of(Process.reference, 0)
        reference = reference_actor.options(**options).remote(config, model_path, threads)
    membership = Membership(runners)
    processes = [RayEngine(engine, index, config.deadlines) for index, engine in enumerate(engines)]
    engine_fleet = EngineFleet(config, processes, membership.tell, alarm)
    vital = {f"trainer rank {rank}": actor for rank, actor in enumerate(trainers)}
    vital |= {f"critic rank {rank}": actor for rank, actor in enumerate(critics)}
    vital |= {"reference": reference} if reference else {}
    is_joined, patience_s = config.cluster.address is not None, config.deadlines.start_s
    fleet = Fleet(
        workers=Workers(
            runners=RayRunners(runners, on_one_machine=not is_joined, patience_s=patience_s),
            engines=engine_fleet,
            trainer=_as_one(config, trainers, critics),
            reference=RayReference(reference) if reference else None,
            open_calls=open_calls,
        ),
        runners=runners,
        engines=engines,
        engine_fleet=engine_fleet,
        membership=membership,
        trainers=[*trainers, *critics],
        rewards=list(rewards.values()),
        reference=reference,
        vital=vital,
        devices=devices,
        is_joined=is_joined,
    )
    others = [*rewards.values(), *([reference] if reference else [])]
    try:
        await within(
            "starting the workers",
            config.deadlines.start_s,
            _start_all(config, engine_fleet, [trainers, critics], runners, others),
            "raise deadlines.start_s if the model takes this long to load",
        )
    except BaseException:
        await end_fleet(fleet)
        raise
    return fleet


def _as_one(config: Config, trainers: list[Any], critics: list[Any]) -> Trainer:
    policy = RayTrainer(trainers, config.trainer, refers_to_itself=refers_to_itself(config))
    return RayActorCritic(policy, RayTrainer(critics, config.trainer, name="critic")) if critics else policy


async def _start_all(
    config: Config, engines: EngineFleet, trainers: Sequence[list[Any]], runners: list[Any], others: list[Any]
) -> None:
    """`trainers` holds sets of ranks that meet each other."""

    async def start_ranks(ranks: list[Any]) -> None:
        rendezvous = await answer("trainer", ranks[0].rendezvous.remote())
        await asyncio.gather(*(answer("trainer", rank.start.remote(rendezvous)) for rank in ranks))

    starting = [engines.start()]
    if config.cluster.placement is Placement.colocated:
        # The trainer needs the memory to start, and to load a checkpoint; the first version wakes the engines.
        await engines.start()
        await engines.sleep()
        starting = []
    await asyncio.gather(
        *(start_ranks(ranks) for ranks in trainers if ranks),
        *starting,
        *(answer("episode runner", runner.start.remote()) for runner in runners),
        *(answer("worker", other.start.remote()) for other in others),
    )


async def stop_fleet(fleet: Fleet) -> None:
    """Let the actors that own processes or shared memory end them; the rest ends with Ray."""
    await fleet.membership.close()
    await fleet.engine_fleet.close()
    closing = [engine.shutdown.remote() for engine in fleet.engines]
    closing += [runner.close.remote() for runner in fleet.runners]
    closing += [trainer.close.remote() for trainer in fleet.trainers]
    closing += [reward.close.remote() for reward in fleet.rewards]
    await asyncio.wait([asyncio.ensure_future(_settled(reference)) for reference in closing], timeout=20)


async def _settled(reference: Any) -> None:
    """Wait for a call whose failure no longer matters: the actor is being ended."""
    await asyncio.gather(reference, return_exceptions=True)


def _threads(config: Config) -> int:
    """Share the cores of this machine out between the processes that compute at the same time; in a cluster each has
    what it reserves."""
    if config.cluster.address is not None:
        return 1
    cores = len(os.sched_getaffinity(0))
    ranks = config.trainer.ranks * (1 + needs_critic(config.algorithm))
    is_colocated = config.cluster.placement is Placement.colocated
    if is_colocated or (config.staleness.max_versions == 0 and not config.algorithm.dynamic_sampling):
        # Engines and trainer take turns, so that each side may have all cores. With dynamic sampling groups are trained
        # while others are played in place of those that were filtered.
        return max(1, cores // max(config.rollout.engines, ranks))
    return max(1, cores // (config.rollout.engines + ranks))
