"""What a person is told of a run that does not fit on its machines: the arithmetic, and what to change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.slots import Block, Machine, Slot, cpus_of, other_way, way_of
from rlflow.config import POOL_LABEL, Config, ModelPlacement, PoolConfig, ProcessKind
from rlflow.errors import ConfigError


def check_counts(pools: Mapping[str, PoolConfig], machines: Sequence[Machine]) -> None:
    """Raise ConfigError where there are fewer machines than the settings say. A run that has lost some goes on with
    fewer."""
    for name, pool in pools.items():
        _check_count(name, pool.machines or 1, machines)


def check_sizes(pools: Mapping[str, PoolConfig], machines: Sequence[Machine]) -> None:
    """Raise ConfigError where there is no machine of a pool, or a smaller one than the settings say."""
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


def _gpus(machine: Machine) -> float:
    return machine.gpus


def _cpus(machine: Machine) -> float:
    return machine.cpus


def check_sums(config: Config, slots: Sequence[Slot], machines: Sequence[Machine]) -> None:
    """Raise ConfigError where a pool has too few GPUs or CPUs in all."""
    for pool in dict.fromkeys(slot.pool for slot in slots):
        wanted = [slot for slot in slots if slot.pool == pool]
        here = [machine for machine in machines if machine.pool == pool or pool is None]
        needed, found = sum(slot.gpus for slot in wanted), sum(machine.gpus for machine in here)
        if needed > found:
            raise ConfigError(
                f"{_who(pool)} needs {needed} GPUs ({_terms(config, wanted, lambda slot: slot.gpus)}); "
                f"{_whose(pool)} {_has(here, _gpus, 'GPU')}; {_cure_gpus(config)}"
            )
        cpus, has = cpus_of(wanted), sum(machine.cpus for machine in here)
        if cpus > has:
            raise ConfigError(
                f"{_who(pool)} needs {cpus:g} CPUs ({_terms(config, wanted, lambda slot: slot.cpus)}); "
                f"{_whose(pool)} {_has(here, _cpus, 'CPU')}; add machines, or lower "
                "one of them" + ("" if config.cluster.cpu_threads in (None, 1) else " or cluster.cpu_threads")
            )


def _who(pool: str | None) -> str:
    return "the run" if pool is None else f"what runs in cluster.pools.{pool}"


def _whose(pool: str | None) -> str:
    return "the cluster" if pool is None else "it"


def _has(machines: Sequence[Machine], of: Callable[[Machine], float], unit: str) -> str:
    """Example: "has 10 GPUs on 3 machines (2 with 4, 1 with 2)"."""
    total = sum(map(of, machines))
    if len(machines) <= 1:
        return f"has {total:g}"
    return f"has {total:g} {unit}s on {len(machines)} machines ({_sizes(machines, of)})"


def _sizes(machines: Sequence[Machine], of: Callable[[Machine], float]) -> str:
    """Example: "2 with 4, 1 with 2"."""
    return ", ".join(f"{count} with {size:g}" for size, count in Counter(map(of, machines)).items())


def _terms(config: Config, slots: Sequence[Slot], of: Callable[[Slot], float]) -> str:
    sums: dict[ProcessKind, float] = defaultdict(float)
    for slot in slots:
        sums[slot.kind] += of(slot)
    return ", ".join(f"{_SETTINGS[kind]} = {total:g}" for kind, total in sums.items() if total)


def _cure_gpus(config: Config) -> str:
    has_roles = gpu_plan(config).counts.keys() - {ProcessKind.engine, ProcessKind.trainer}
    is_shared = config.cluster.roles is ModelPlacement.shared
    return "lower one of them" + (", or set cluster.roles=shared" if has_roles and not is_shared else "")


def too_scattered(config: Config, blocks: Sequence[Block], machines: Sequence[Machine], *, is_one_machine: bool) -> str:
    """For where there is enough in all, but not for a block on any one machine."""
    on_gpus = any(block.gpus for block in blocks)
    unit = "GPUs" if on_gpus else "CPUs"
    largest = blocks[0]
    here = [machine for machine in machines if largest.pool in (None, machine.pool)]
    sizes = _sizes(here, _gpus if on_gpus else _cpus)
    amount = largest.gpus if on_gpus else largest.cpus
    if is_one_machine and ProcessKind.trainer in largest.kinds:
        return (
            f"{way_of(config)} needs the trainer and all engines on one machine, with {amount:g} {unit}; of the "
            f"cluster's machines, {sizes}; set {other_way(config)}"
        )
    parts = ", ".join(f"{_NAMES[kind]} {amount:g}" for kind, amount in _largest(blocks, on_gpus=on_gpus).items())
    return (
        f"the {unit} of the cluster are enough, but not those of each machine ({sizes}); the processes need on one "
        f"machine each: {parts}; lower rollout.tensor_parallel, or have machines with more {unit}"
    )


def _largest(blocks: Sequence[Block], *, on_gpus: bool) -> dict[ProcessKind, float]:
    found: dict[ProcessKind, float] = {}
    for block in blocks:
        for kind in block.kinds:
            found[kind] = max(found.get(kind, 0), block.gpus if on_gpus else block.cpus)
    return {kind: amount for kind, amount in found.items() if amount >= 1}


_SETTINGS = {
    ProcessKind.engine: "rollout.engines x rollout.tensor_parallel",
    ProcessKind.trainer: "trainer.ranks",
    ProcessKind.critic: "critic",
    ProcessKind.reference: "reference",
    ProcessKind.reward_model: "reward.model_replicas",
    ProcessKind.runner: "runners",
    ProcessKind.reward: "rewards",
}
_NAMES = {
    ProcessKind.engine: "an engine",
    ProcessKind.trainer: "the trainer's neighbouring ranks",
    ProcessKind.critic: "the critic's neighbouring ranks",
    ProcessKind.reference: "the reference",
    ProcessKind.reward_model: "a reward model",
    ProcessKind.runner: "a runner",
    ProcessKind.reward: "the rewards",
}
