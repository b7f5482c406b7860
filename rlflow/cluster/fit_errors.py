"""What a person is told when a run does not fit on its machines: the arithmetic, and what to change."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.slots import Machine, Slot, SlotBlock, cpus_of, other_way, way_of
from rlflow.config import POOL_LABEL, Config, ModelPlacement, PoolConfig, ProcessKind
from rlflow.errors import ConfigError


def check_counts(pools: Mapping[str, PoolConfig], machines: Sequence[Machine]) -> None:
    """Raise ConfigError when there are fewer machines than the settings say. Not asked of a run that has lost some."""
    for name, pool in pools.items():
        _check_count(name, pool.machines or 1, machines)


def check_sizes(pools: Mapping[str, PoolConfig], machines: Sequence[Machine]) -> None:
    """Raise ConfigError when a pool has no machine, or a smaller one than the settings say."""
    for name, pool in pools.items():
        _check_count(name, 1, machines)
        here = [machine for machine in machines if machine.pool == name]
        for what, size, of in (("gpus", pool.gpus, _gpus), ("cpus", pool.cpus, _cpus)):
            if size is not None and (short := [each for each in here if of(each) < size]):
                raise ConfigError(
                    f"cluster.pools.{name}.{what} is {size}, but the machine {short[0].name} has {of(short[0]):g}; "
                    f"lower it, or start Ray there with more"
                )


def _check_count(name: str, wanted: int, machines: Sequence[Machine]) -> None:
    found = sum(machine.pool == name for machine in machines)
    if found < wanted:
        raise ConfigError(
            f"cluster.pools.{name} has {found} of the {wanted} machines that it needs: nodes of the cluster with the "
            f"label {POOL_LABEL}={name}; start them with `ray start --labels {POOL_LABEL}={name}`"
        )


def check_sums(config: Config, slots: Sequence[Slot], machines: Sequence[Machine]) -> None:
    """Raise ConfigError when a pool has too few GPUs or CPUs in total."""
    for pool in dict.fromkeys(slot.pool for slot in slots):
        wanted = [slot for slot in slots if slot.pool == pool]
        here = [machine for machine in machines if machine.pool == pool or pool is None]
        who, whose = ("the run", "the cluster") if pool is None else (f"what runs in cluster.pools.{pool}", "it")
        needed, found = sum(slot.gpus for slot in wanted), sum(machine.gpus for machine in here)
        if needed > found:
            has_roles = gpu_plan(config).counts.keys() - {ProcessKind.engine, ProcessKind.trainer}
            can_share = has_roles and config.cluster.roles is not ModelPlacement.shared
            raise ConfigError(
                f"{who} needs {needed} GPUs ({_terms(wanted, _gpus)}); {whose} {_has(here, _gpus, 'GPU')}; "
                "lower one of them" + (", or set cluster.roles=shared" if can_share else "")
            )
        cpus, has = cpus_of(wanted), sum(machine.cpus for machine in here)
        if cpus > has:
            raise ConfigError(
                f"{who} needs {cpus:g} CPUs ({_terms(wanted, _cpus)}); {whose} {_has(here, _cpus, 'CPU')}; "
                "add machines, or lower one of them"
                + ("" if config.cluster.cpu_threads in (None, 1) else " or cluster.cpu_threads")
            )


def _has(machines: Sequence[Machine], of: Callable[[Machine], float], unit: str) -> str:
    """Example: "has 10 GPUs on 3 machines (2 with 4, 1 with 2)"."""
    total = sum(map(of, machines))
    if len(machines) <= 1:
        return f"has {total:g}"
    return f"has {total:g} {unit}s on {len(machines)} machines ({_sizes(machines, of)})"


def _sizes(machines: Sequence[Machine], of: Callable[[Machine], float]) -> str:
    """Example: "2 with 4, 1 with 2"."""
    return ", ".join(f"{count} with {size:g}" for size, count in Counter(map(of, machines)).items())


def _terms(slots: Sequence[Slot], of: Callable[[Slot], float]) -> str:
    """Example: "trainer.ranks = 4, reference = 1"."""
    sums: dict[ProcessKind, float] = defaultdict(float)
    for slot in slots:
        sums[slot.kind] += of(slot)
    return ", ".join(f"{_SETTINGS[kind]} = {total:g}" for kind, total in sums.items() if total)


def too_scattered(
    config: Config, blocks: Sequence[SlotBlock], machines: Sequence[Machine], *, is_one_machine: bool
) -> str:
    """The message when the cluster has enough in total, but no single machine has enough for one of `blocks`.

    `blocks` begins with the largest.
    """
    largest = blocks[0]
    on_gpus = any(block.gpus for block in blocks)
    unit, of = ("GPUs", _gpus) if on_gpus else ("CPUs", _cpus)
    sizes = _sizes([machine for machine in machines if largest.pool in (None, machine.pool)], of)
    if is_one_machine and ProcessKind.trainer in largest.kinds:
        return (
            f"{way_of(config)} needs the trainer and all engines on one machine, with {of(largest):g} {unit}; of the "
            f"cluster's machines, {sizes}; set {other_way(config)}"
        )
    amounts: dict[ProcessKind, float] = {}
    for block in blocks:
        for kind in block.kinds:
            amounts[kind] = max(amounts.get(kind, 0), of(block))
    parts = ", ".join(f"{_NAMES[kind]} {amount:g}" for kind, amount in amounts.items() if amount >= 1)
    return (
        f"the {unit} of the cluster are enough, but not those of each machine ({sizes}); the processes need on one "
        f"machine each: {parts}; lower rollout.tensor_parallel, or have machines with more {unit}"
    )


def no_room(kind: ProcessKind, pool: str | None, cpus: float) -> str:
    """The message when no machine has the little left that a process takes that mostly waits."""
    where = "the cluster" if pool is None else f"cluster.pools.{pool}"
    return (
        f"no machine of {where} has {cpus:g} CPUs left for {_NAMES[kind]}; have one more CPU on one of them, or fewer "
        "engines or ranks there"
    )


_gpus: Callable[[Machine | Slot | SlotBlock], float] = attrgetter("gpus")
_cpus: Callable[[Machine | Slot | SlotBlock], float] = attrgetter("cpus")
_SETTINGS = {
    ProcessKind.engine: "rollout.engines x rollout.tensor_parallel",
    ProcessKind.trainer: "trainer.ranks",
    ProcessKind.critic: "critic",
    ProcessKind.reference: "cluster.reference_ranks",
    ProcessKind.teacher: "teachers x teacher.ranks",
    ProcessKind.reward_model: "reward models x reward.model_replicas",
    ProcessKind.runner: "runners",
    ProcessKind.reward: "rewards",
}
_NAMES = {
    ProcessKind.engine: "an engine",
    ProcessKind.trainer: "the trainer's neighbouring ranks",
    ProcessKind.critic: "the critic's neighbouring ranks",
    ProcessKind.reference: "a rank of the reference",
    ProcessKind.teacher: "a rank of a teacher",
    ProcessKind.reward_model: "a reward model",
    ProcessKind.runner: "a runner",
    ProcessKind.reward: "the rewards",
}
