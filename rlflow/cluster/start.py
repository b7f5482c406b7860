"""Starts Ray and the actors of one run, and ends them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray._private import ray_constants

from rlflow.algorithms.chosen import needs_critic
from rlflow.cluster.calls import DISK, RayReference, RayRunners, RayTrainer, answer, open_calls
from rlflow.cluster.critic import RayActorCritic
from rlflow.cluster.devices import Devices
from rlflow.cluster.engines import EngineActor, Membership, RayEngine
from rlflow.cluster.rewards import start_rewards
from rlflow.cluster.runners import start_runners
from rlflow.compute import ONE_ARENA
from rlflow.config import Config, Placement, Process, needs_reference, object_store_bytes, refers_to_itself
from rlflow.deadlines import within
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError
from rlflow.roles import Trainer, Workers
from rlflow.rollout.fleet import EngineFleet
from rlflow.workers.reference import ReferenceWorker
from rlflow.workers.trainer.actor import TrainerWorker

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 10.0
MANY_CALLS = 4096
"""Calls that an asynchronous actor may have open; the admission budget bounds them long before."""


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
    devices: Devices


@contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """Join `cluster.address`, or start Ray on this machine for as long as the block lasts."""
    if ray.is_initialized():
        raise ConfigError("Ray is already running in this process; start rlflow in a process of its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this Ray hides every GPU from actors that ask for none and warns about it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A group that ends in an error has one in each of its payloads too, which nobody reads; Ray would print them all.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if config.cluster.address is None:
        # "local" also where a Ray cluster happens to run on this machine: a run joins one only when told to.
        options |= {"address": "local", "include_dashboard": False, "_node_ip_address": LOOPBACK}
        _stay_on_loopback()
        options["object_store_memory"] = object_store_bytes(config)
    try:
        if config.cluster.address is not None:
            _check_address(config.cluster.address)
            options["address"] = config.cluster.address
        ray.init(**options)
    except (ConnectionError, TimeoutError, socket.gaierror) as error:
        raise ConfigError(
            f"cluster.address is {config.cluster.address!r}, but no Ray cluster answers there: {error}; start one, "
            "set RAY_AUTH_MODE=token if it asks for a token, or leave it null to start Ray on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _stay_on_loopback() -> None:
    """Have Ray keep the loopback address that it is given.

    It takes it for a mistake and looks for one that others can reach, unless it believes to be on a machine that cannot
    be part of a cluster. It has read that when it was imported; its processes read it from the environment.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


async def start_fleet(
    config: Config,
    model_path: str,
    spec: EnvironmentSpec,
    alarm: Callable[[str], None],
    reward_model_path: str | None = None,
) -> Fleet:
    """Create every actor at once and wait until all of them are ready.

    `reward_model_path` is the folder of `reward.model`, which scores in place of a function.
    `alarm` is given what people should know of later: an engine that was lost.
    """
    devices = Devices(config)
    await devices.ready()
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
    trainer_actor = cast(Any, ray.remote)(concurrency_groups={DISK: 1}, runtime_env=environment)(TrainerWorker)
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
        options = devices.of(Process.reference, 0)
        reference = ray.remote(ReferenceWorker).options(**options).remote(config, model_path, threads)
    membership = Membership(runners)
    processes = [RayEngine(engine, index, config.deadlines) for index, engine in enumerate(engines)]
    engine_fleet = EngineFleet(config, processes, membership.tell, alarm)
    await within(
        "starting the workers",
        config.deadlines.start_s,
        _start_all(
            config, engine_fleet, [trainers, critics], runners, [*rewards.values(), *([reference] if reference else [])]
        ),
        "raise deadlines.start_s if the model takes this long to load",
    )
    workers = Workers(
        runners=RayRunners(runners),
        engines=engine_fleet,
        trainer=_as_one(config, trainers, critics),
        reference=RayReference(reference) if reference else None,
        open_calls=open_calls,
    )
    return Fleet(
        workers=workers,
        runners=runners,
        engines=engines,
        engine_fleet=engine_fleet,
        membership=membership,
        trainers=[*trainers, *critics],
        rewards=list(rewards.values()),
        reference=reference,
        devices=devices,
    )


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


def _check_address(address: str) -> None:
    """Raise ConfigError for the address of a dashboard, ConnectionError when nothing listens at host:port; Ray itself
    would try for more than a minute."""
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"cluster.address={address} is where jobs are handed in; use `rlflow submit` in place of `rlflow train`, "
            "or give the address of the cluster: auto, or host:port"
        )
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "://" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


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
