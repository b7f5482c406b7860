"""The actors of one run: Ray itself, one function for each kind of process, and how they all end.

    Devices reserves -> every actor is created -> all of them start at once -> Fleet

Ray restarts an engine, a runner and a process that scores under the same handle. It restarts no rank, of a frozen model
either: the ranks of a model meet once, and what a trainer holds is in checkpoints only. So `run_unless_lost` ends the
fleet when one of them is lost.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from rlflow.algorithms.registry import chosen_advantage, needs_critic
from rlflow.cluster.calls import (
    DISK,
    WATCH,
    RayFrozenModel,
    answer,
    open_calls,
    wait_until_ended,
)
from rlflow.cluster.devices import Devices
from rlflow.cluster.engines import EngineActor, Membership, RayEngine
from rlflow.cluster.probe import EngineProbe
from rlflow.cluster.profile import profile
from rlflow.cluster.pulse import watched
from rlflow.cluster.ray import agents_end_with_this_process, join_ray, private_ray, without_dumps
from rlflow.cluster.rewards import start_rewards
from rlflow.cluster.runners import RayRunners, start_runners
from rlflow.cluster.shared_files import check_shared_files
from rlflow.cluster.trainers import RayActorCritic, RayTrainer
from rlflow.cluster.versions import check_versions
from rlflow.config import Config, Placement, ProcessKind
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerError, WorkerLost
from rlflow.groups.silent import has_no_gradient
from rlflow.roles import REFERENCE, TEACHER, StagedWeights, Workers
from rlflow.rollout.fleet import EngineFleet
from rlflow.runtime import scratch
from rlflow.runtime.deadlines import or_hung
from rlflow.runtime.derived import (
    held_teachers,
    live_groups,
    needs_reference,
    object_store_bytes,
    policy_is_reference,
    recomputes,
    reference_ranks,
    served_teachers,
    teacher_ranks,
)
from rlflow.runtime.environment import ONE_ARENA
from rlflow.runtime.signals import hang_ups_ignored
from rlflow.telemetry.text import duration
from rlflow.workers.frozen import FrozenWorker
from rlflow.workers.served_teacher import ServedTeacher
from rlflow.workers.trainer.actor import TrainerWorker

T = TypeVar("T")

MANY_CALLS = 4096
"""Calls that an asynchronous actor may have open; the admission budget bounds them long before."""
NOTICE_S = 60.0
"""Seconds that Ray may need to notice that a machine is gone. The other ranks of the trainer notice earlier, because a
connection breaks."""
STOP_S = 20.0
"""Seconds that actors have to end their processes; Ray then ends what is left."""
_EVERYWHERE = {
    # Without this Ray hides every GPU from actors that ask for none and warns about it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would print a line every few seconds while one waits for an actor that it is restarting.
    "RAY_enable_output_error_log_if_still_retry": "0",
}
"""Settings of Ray for the driver and all actors."""


@contextmanager
def ray_cluster(config: Config, run_dir: Path | None = None) -> Iterator[None]:
    """Join `cluster.address`, or start Ray on this machine for as long as the block lasts.

    `run_dir` is the directory of the run that this is for; see `scratch.opened`.
    """
    if ray.is_initialized():
        raise ConfigError("Ray is already running in this process; start rlflow in a process of its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Each payload of a group that ends in an error holds that error too. Nobody reads those; Ray would print them all.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    for name, value in _EVERYWHERE.items():
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        folder = stack.enter_context(scratch.opened(run_dir))
        stack.enter_context(without_dumps())
        if config.cluster.address is not None:
            # The processes of a cluster that is there do not have this process's environment.
            theirs = {**_EVERYWHERE, scratch.VARIABLE: os.environ[scratch.VARIABLE]}
            join_ray(config.cluster.address, **quiet, runtime_env={"env_vars": theirs})
            stack.callback(ray.shutdown)
        else:
            own = stack.enter_context(private_ray(folder))
            with hang_ups_ignored():
                ray.init(object_store_memory=object_store_bytes(config), **quiet, **own)
            stack.callback(ray.shutdown)
            stack.enter_context(agents_end_with_this_process())
        yield


@dataclass(kw_only=True, slots=True)
class Fleet:
    """Everything that was started."""

    workers: Workers
    runners: list[Any]
    engines: list[Any]
    engine_fleet: EngineFleet
    membership: Membership
    ranks: list[Any]
    """The ranks of the trainer, then those of the critic."""
    rewards: list[Any]
    vital: dict[str, Any]
    """Name -> actor that Ray does not restart."""
    devices: Devices
    is_joined: bool
    """Whether the cluster has other machines, which may be lost."""
    has_ended: bool = False

    async def stop(self) -> None:
        """Let the actors that own processes or shared memory end them; the rest ends with Ray."""
        await self.membership.close()
        await self.engine_fleet.close()
        closing = [engine.shutdown.remote() for engine in self.engines]
        closing += [actor.close.remote() for actor in (*self.runners, *self.ranks, *self.rewards)]
        # How a call ends no longer matters: its actor is being ended.
        settled = [asyncio.gather(reference, return_exceptions=True) for reference in closing]
        await asyncio.wait(settled, timeout=STOP_S)

    async def end(self) -> None:
        """Kill all processes, and give back what was reserved for them. Safe to call twice."""
        self.has_ended = True
        await self.membership.close()
        await self.engine_fleet.close()
        for actor in (*self.engines, *self.runners, *self.rewards, *self.vital.values()):
            ray.kill(actor)
        self.devices.release()


async def start_fleet(
    config: Config,
    model_path: str,
    spec: EnvironmentSpec,
    alarm: Callable[[str], None],
    reward_models: Mapping[str, str] = {},
    *,
    tell: Callable[[str], None],
    is_restart: bool = False,
) -> Fleet:
    """Create every actor at once and wait until all of them are ready. Without a trainer (trainer.ranks=0) the engines
    serve the model of `model_path` as version 0.

    `reward_models` are the folders of `reward.model` by their names.
    `alarm` is told what people should know later: that an engine was lost, for example. `tell` hears what is ready.
    After a loss (`is_restart`) there may be fewer machines than cluster.pools says.
    """
    devices = Devices(config, is_restart=is_restart)
    await devices.reserve()
    config = devices.config
    if machines := devices.machines():
        await check_versions(machines)
        await check_shared_files(config, machines, model_path, reward_models)
    threads = _threads(config)
    common = (config, model_path, devices, threads)
    engines = _create_engines(*common)
    trainers = _create_ranks(*common, ProcessKind.trainer)
    critics = _create_ranks(*common, ProcessKind.critic) if needs_critic(config.algorithm) else []
    rewards = start_rewards(config, spec.reward, reward_models, devices, threads, MANY_CALLS)
    runners = start_runners(config, model_path, spec, list(rewards), list(engines), devices, MANY_CALLS)
    frozen = _create_frozen(*common)

    membership = Membership(runners)
    processes = [RayEngine(engine, index, config.deadlines) for index, engine in enumerate(engines.values())]
    engine_fleet = EngineFleet(config, processes, membership.tell, alarm)
    policy = _policy(config, trainers)
    critic = RayTrainer(critics, config.trainer, name="critic") if critics else None
    ranks = {f"trainer rank {rank}": actor for rank, actor in enumerate(trainers)}
    ranks |= {f"critic rank {rank}": actor for rank, actor in enumerate(critics)}
    vital = ranks | {f"{name} rank {rank}": actor for name, its in frozen.items() for rank, actor in enumerate(its)}
    is_joined = config.cluster.address is not None
    workers = Workers(
        runners=RayRunners(runners, on_one_machine=not is_joined, patience_s=config.deadlines.start_s),
        engines=engine_fleet,
        trainer=RayActorCritic(policy, critic) if critic else policy,
        frozen={name: RayFrozenModel(name, actors) for name, actors in frozen.items()},
        probe=EngineProbe(policy, list(engines.values())) if trainers and engines else None,
        open_calls=open_calls,
        profile=partial(profile, ranks, list(engines.values())),
    )
    fleet = Fleet(
        workers=workers,
        runners=runners,
        engines=list(engines.values()),
        engine_fleet=engine_fleet,
        membership=membership,
        ranks=[*trainers, *critics],
        rewards=list(rewards.values()),
        vital=vital,
        devices=devices,
        is_joined=is_joined,
    )
    workers.end = fleet.end
    try:
        groups = {"trainer": trainers, "critic": critics, **frozen}
        starting = _start_all(config, engine_fleet, groups, runners, list(rewards.values()), tell)
        await or_hung("starting the workers", config.deadlines, "start_s", starting)
        if not trainers:  # nobody will send them anything else
            await engine_fleet.load_weights(
                StagedWeights(version=0, path=model_path, num_bytes=0, slots=(), buckets=())
            )
    except BaseException:
        await fleet.end()
        raise
    return fleet


async def run_unless_lost(fleet: Fleet, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.

    Raises WorkerLost, with the fleet and the work ended, when a process of `fleet.vital` is lost before. A PayloadLost
    of the work is raised as it is, with the fleet ended too. An error that no lost process explains is raised as it is.
    """
    working = asyncio.create_task(work)
    watching = [asyncio.create_task(wait_until_ended(name, actor)) for name, actor in fleet.vital.items()]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if by_work := fleet.has_ended:  # because of a process that hangs: the work is about to say which
            await asyncio.wait([working], timeout=NOTICE_S)
        error = working.exception() if working.done() else None
        if working.done() and error is None:
            return working.result()
        if error is not None and not isinstance(error, RunError):
            raise error
        is_lost = isinstance(error, WorkerLost | PayloadLost)
        if isinstance(error, WorkerError) and not is_lost and fleet.is_joined:
            await asyncio.wait(watching, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        ended = [watch for watch in watching if watch.done() and not (by_work and working.done())]
        if ended or is_lost:
            await fleet.end()  # before the work, so that nothing that it waits for is still to come
        return ended[0].result() if ended else working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)  # so that no failure goes unread


def _policy(config: Config, ranks: list[Any]) -> RayTrainer:
    return RayTrainer(
        ranks,
        config.trainer,
        policy_is_reference=policy_is_reference(config),
        recomputes=recomputes(config.algorithm),
        needs_log_ratios=chosen_advantage(config).traits.needs_log_ratios,
        is_silent=partial(has_no_gradient, config),
    )


def _create_engines(config: Config, model_path: str, devices: Devices, threads: int) -> dict[str, Any]:
    """Name -> actor."""
    actor = watched(EngineActor, config, leads_group=True)
    return {
        (name := f"engine {index}"): actor.options(
            name=name, max_concurrency=MANY_CALLS, max_restarts=-1, **devices.of(ProcessKind.engine, index)
        ).remote(f"rollout engine {index}", config, model_path, index, threads)
        for index in range(config.rollout.engines)
    }


def _create_ranks(config: Config, model_path: str, devices: Devices, threads: int, kind: ProcessKind) -> list[Any]:
    """The ranks of the trainer or of the critic."""
    # Beside the writes, all calls come on one thread, though not the main one: torch's and CUDA's settings of it hold.
    groups = {DISK: 1, WATCH: 1}
    actor = watched(TrainerWorker, config, concurrency_groups=groups, runtime_env={"env_vars": ONE_ARENA})
    is_critic, count = kind is ProcessKind.critic, config.trainer.ranks
    return [
        actor.options(**devices.of(kind, rank)).remote(
            f"{kind.value} rank {rank}", config, model_path, rank, count, threads, is_critic=is_critic
        )
        for rank in range(count)
    ]


def _create_frozen(config: Config, model_path: str, devices: Devices, threads: int) -> dict[str, list[Any]]:
    """Name -> ranks, of the reference and of each teacher."""
    actor = watched(FrozenWorker, config, concurrency_groups={WATCH: 1})

    def create(name: str, path: str, kind: ProcessKind, first: int, count: int) -> list[Any]:
        """`count` ranks, which are the processes from `first` on of their kind."""
        return [
            actor.options(**devices.of(kind, first + rank)).remote(
                f"{name} rank {rank}", config, path, rank, count, threads, kind is ProcessKind.teacher
            )
            for rank in range(count)
        ]

    found: dict[str, list[Any]] = {}
    if needs_reference(config):
        found[REFERENCE] = create(REFERENCE, model_path, ProcessKind.reference, 0, reference_ranks(config))
    count = teacher_ranks(config)
    held = held_teachers(config)
    for number, (name, path) in enumerate(held.items()):
        found[name] = create(name, path, ProcessKind.teacher, number * count, count)
    return found | _create_served(config, model_path, devices, len(held) * count)


def _create_served(config: Config, model_path: str, devices: Devices, first: int) -> dict[str, list[Any]]:
    """Name -> the process that asks the server of a teacher. `first`: its number among the processes of teachers."""
    actor = watched(ServedTeacher, config, concurrency_groups={WATCH: 1})
    return {
        name: [
            actor.options(
                max_concurrency=live_groups(config), **devices.of(ProcessKind.teacher, first + number)
            ).remote(name, config, model_path, url, f"teacher.models.{name.removeprefix(TEACHER).strip()}")
        ]
        for number, (name, url) in enumerate(served_teachers(config).items())
    }


async def _start_all(
    config: Config,
    engines: EngineFleet,
    groups: Mapping[str, list[Any]],
    runners: list[Any],
    rewards: list[Any],
    tell: Callable[[str], None],
) -> None:
    """`groups` holds sets of ranks that meet each other, by name."""
    began_s = time.monotonic()

    async def timed(name: str, starting: Awaitable[object]) -> None:
        found = await starting
        about = f" ({found})" if isinstance(found, str) else ""
        tell(f"{name} ready after {duration(time.monotonic() - began_s)}{about}")

    async def start_ranks(ranks: list[Any]) -> str:
        rendezvous = await answer("trainer", ranks[0].rendezvous.remote())
        return (await asyncio.gather(*(answer("trainer", rank.start.remote(rendezvous)) for rank in ranks)))[0]

    starting = [timed("engines", engines.start())]
    if config.cluster.placement is Placement.colocated:
        # The trainer needs the memory to start, and to load a checkpoint; the first version wakes the engines.
        await starting.pop()
        await engines.sleep()
    players = [answer("episode runner", runner.start.remote()) for runner in runners]
    players += [answer("worker", reward.start.remote()) for reward in rewards]
    await asyncio.gather(
        *(timed(name, start_ranks(ranks)) for name, ranks in groups.items() if ranks),
        *starting,
        timed("environments and rewards", asyncio.gather(*players)),
    )


def _threads(config: Config) -> int:
    """Threads of each process that computes: `cluster.cpu_threads`; or a share of this machine's cores; in a cluster
    one, which is what the process reserves."""
    if config.cluster.cpu_threads:
        return config.cluster.cpu_threads
    if config.cluster.address is not None:
        return 1
    cores = len(os.sched_getaffinity(0))
    ranks = config.trainer.ranks * (1 + needs_critic(config.algorithm))
    is_colocated = config.cluster.placement is Placement.colocated
    computes_meanwhile = config.algorithm.dynamic_sampling or needs_reference(config) or held_teachers(config)
    if is_colocated or (config.staleness.max_versions == 0 and not computes_meanwhile):
        # Engines and trainer take turns, so that each side may have all cores. With dynamic sampling groups are trained
        # while others are played in place of those that were filtered, and frozen models score while others are played.
        # With more threads than cores, a step of distil_arithmetic takes 80 s on two of them instead of 30.
        return max(1, cores // max(config.rollout.engines, ranks))
    return max(1, cores // (config.rollout.engines + ranks))
