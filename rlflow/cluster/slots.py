"""What the processes of a run need of the machines. Pure: a dry run can ask too, because no Ray is imported.

processes -> slots (what one reservation takes) -> blocks (slots that must share a machine)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlflow.cluster.gpus import gpu_plan
from rlflow.config import Config, Placement, PoolConfig, ProcessKind, Transport
from rlflow.errors import ConfigError
from rlflow.rewards.models import calls_functions
from rlflow.runtime.derived import live_groups, ranks_per_share, sends_adapters, served_teachers, transport_of
from rlflow.settings.cluster_checks import pool_of

EPISODES_PER_RUNNER = 1024
"""Live episodes that one runner, which is one process on one core, is to play."""
SLIVER = 0.01
"""CPUs reserved for a process that mostly waits: enough to keep it off a machine that has none left."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    name: str
    cpus: float
    """Infinite when nothing is reserved: on a single machine all processes share them."""
    gpus: int
    pool: str | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Slot:
    """What is reserved on one machine, for one process or for several that share a GPU."""

    processes: tuple[tuple[ProcessKind, int], ...]
    """(kind, number) of each; the first one names the slot."""
    cpus: float
    gpus: int
    pool: str | None

    @property
    def kind(self) -> ProcessKind:
        return self.processes[0][0]


@dataclass(kw_only=True, slots=True, frozen=True)
class SlotBlock:
    """Slots that must be on one machine."""

    members: tuple[int, ...]
    """Numbers of the slots."""
    kinds: frozenset[ProcessKind]
    cpus: float
    gpus: int
    pool: str | None


def slots_of(config: Config, *, on_gpus: bool) -> list[Slot]:
    """One slot for each process that computes, except those that share the GPU of a rank of the trainer."""
    plan = gpu_plan(config)
    # Without GPUs there is nothing to share but the machine.
    sharing = plan.sharing if on_gpus else (ProcessKind.trainer,)
    threads = 1 if on_gpus else config.cluster.cpu_threads or 1
    slots = []
    for kind, count in plan.counts.items():
        if kind in sharing and kind is not ProcessKind.trainer:
            continue
        for index in range(count):
            processes = [(kind, index)]
            if kind is ProcessKind.trainer:
                others = [other for other in sharing if other is not kind]
                processes += [(other, each) for other in others for each in range(index, plan.counts[other], count)]
            pools = {each: pool_of(config.cluster.pools, each) for each, _ in processes}
            if len(set(pools.values())) > 1:
                raise ConfigError(
                    f"cluster.pools keeps {_where(pools)} apart, but "
                    f"cluster.placement={config.cluster.placement.value} and "
                    f"cluster.roles={config.cluster.roles.value} put them on the same GPUs; have them in one pool, or "
                    "set both to separate"
                )
            width = plan.per_engine if kind is ProcessKind.engine else 1
            slots.append(
                Slot(
                    processes=tuple(processes),
                    cpus=threads * max(len(processes), width),
                    gpus=width if on_gpus else 0,
                    pool=pools[kind],
                )
            )
    first = plan.counts.get(ProcessKind.teacher, 0)
    return slots + waiting_slots(config, ProcessKind.teacher, len(served_teachers(config)), first)


def waiting_slots(config: Config, kind: ProcessKind, count: int, first: int = 0) -> list[Slot]:
    """Slots of processes that mostly wait, numbered from `first`."""
    pool = pool_of(config.cluster.pools, kind)
    return [Slot(processes=((kind, first + index),), cpus=SLIVER, gpus=0, pool=pool) for index in range(count)]


def num_waiting(config: Config, kind: ProcessKind, num_machines: int) -> int:
    """How many runners, or actors that score, play on so many machines: one on each at least, and enough runners."""
    if kind is ProcessKind.runner:
        live = live_groups(config) * config.algorithm.group_size
        return max(num_machines, -(-live // EPISODES_PER_RUNNER))
    return num_machines if calls_functions(config.reward) else 0


def _where(pools: Mapping[ProcessKind, str | None]) -> str:
    """Example: "engine (in rollout) and trainer (in training)"."""
    return " and ".join(f"{kind.value} (in {pool})" for kind, pool in sorted(pools.items()))


def machines_of(pools: Mapping[str, PoolConfig]) -> list[Machine] | None:
    """The machines that the settings describe; None when the settings leave them to the cluster."""
    if not pools or any(None in (pool.machines, pool.cpus, pool.gpus) for pool in pools.values()):
        return None
    return [
        Machine(name=f"{name} {index}", pool=name, cpus=pool.cpus or 0, gpus=pool.gpus or 0)
        for name, pool in pools.items()
        for index in range(pool.machines or 0)
    ]


def needs_one_machine(config: Config, *, on_gpus: bool) -> bool:
    """Whether weights can reach the engines only within one machine. (An engine on the GPU of a rank is on that rank's
    machine anyway.)"""
    transport = transport_of(config)
    if transport is Transport.shm or sends_adapters(config):
        return not (on_gpus and config.cluster.placement is Placement.colocated)
    return transport is Transport.ipc


def way_of(config: Config) -> str:
    """The setting by which weights get to the engines."""
    return "lora.send=adapters" if sends_adapters(config) else f"weights.transport={transport_of(config).value}"


def other_way(config: Config) -> str:
    """The setting with which weights get to the engines of other machines."""
    if sends_adapters(config):
        return "lora.send=merged and weights.transport=disk"
    if transport_of(config) is Transport.ipc:
        return "weights.transport=shm"
    return "weights.transport=disk" if config.lora.rank is not None else "weights.transport=p2p"


def blocks_of(config: Config, slots: Sequence[Slot], *, is_one_machine: bool) -> list[SlotBlock]:
    def key(number: int) -> tuple[str, int]:
        kind, index = slots[number].processes[0]
        if is_one_machine and kind in (ProcessKind.engine, ProcessKind.trainer):
            return "", 0
        if kind in (ProcessKind.trainer, ProcessKind.critic):
            return kind.value, index // ranks_per_share(config.trainer)
        return kind.value, index

    members: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number in range(len(slots)):
        members[key(number)].append(number)
    pools = {slots[number].kind: slots[number].pool for number in members.get(("", 0), ())}
    if len(set(pools.values())) > 1:
        raise ConfigError(
            f"cluster.pools keeps {_where(pools)} apart, but {way_of(config)} needs them on one machine; have them in "
            f"one pool, or set {other_way(config)}"
        )
    return [
        SlotBlock(
            members=tuple(numbers),
            kinds=frozenset(slots[number].kind for number in numbers),
            cpus=cpus_of([slots[number] for number in numbers]),
            gpus=sum(slots[number].gpus for number in numbers),
            pool=slots[numbers[0]].pool,
        )
        for numbers in members.values()
    ]


def cpus_of(slots: Iterable[Slot]) -> float:
    return round(sum(slot.cpus for slot in slots), 4)
