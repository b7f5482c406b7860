"""Which process is on which machine, and whether they all fit. Pure: imports no Ray, so that a dry run can ask too.

processes -> slots (what one placement takes) -> blocks (slots of one machine) -> fit on machines, largest first
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.cluster.gpus import GpuPlan, gpu_plan
from rlflow.cluster_checks import pool_of
from rlflow.config import (
    Config,
    Placement,
    PoolConfig,
    Process,
    Roles,
    Transport,
    sends_adapters,
    transport_of,
)
from rlflow.errors import ConfigError

ENGINES_PER_RUNNER = 8
SLIVER = 0.01
"""CPUs that a process reserves that mostly waits: enough to keep it off a machine that has none to give."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    name: str
    cpus: float
    """Infinite where nothing is reserved: on one machine all processes share them."""
    gpus: int
    pool: str | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Slot:
    """What is reserved on one machine for processes that share it."""

    processes: tuple[tuple[Process, int], ...]
    """Kind and number of each. The first one names the slot."""
    cpus: float
    gpus: int
    pool: str | None

    @property
    def kind(self) -> Process:
        return self.processes[0][0]


@dataclass(kw_only=True, slots=True, frozen=True)
class Placed:
    slots: tuple[Slot, ...]
    machines: tuple[str, ...]
    """The machine of each slot."""
    is_pinned: tuple[bool, ...]
    """Whether a slot must be there: ranks of the trainer are neighbours, and some transports have one machine only. The
    others may be anywhere in their pool, also later, when their machine is lost."""
    config: Config
    """With weights.transport settled."""


def slots_of(config: Config, *, on_gpus: bool) -> list[Slot]:
    """One for each process, but for those that share the GPU of a rank of the trainer."""
    plan = gpu_plan(config)
    # Without GPUs there is nothing to share but the machine.
    sharing = plan.sharing if on_gpus else (Process.trainer,)
    slots = []
    for kind, count in plan.counts.items():
        if kind in sharing and kind is not Process.trainer:
            continue
        for index in range(count):
            sharers = [other for other in sharing if index < plan.counts[other]] if kind is Process.trainer else [kind]
            slots.append(_slot(config, plan, [(other, index) for other in sharers], on_gpus=on_gpus))
    waiting = [(Process.runner, index) for index in range(num_runners(config))]
    if config.reward.model is None:
        waiting.append((Process.reward, 0))
    slots += [
        Slot(processes=(each,), cpus=SLIVER, gpus=0, pool=pool_of(config.cluster.pools, each[0])) for each in waiting
    ]
    return slots


def num_runners(config: Config) -> int:
    """One for every few engines."""
    return -(-config.rollout.engines // ENGINES_PER_RUNNER)


def _slot(config: Config, plan: GpuPlan, processes: list[tuple[Process, int]], *, on_gpus: bool) -> Slot:
    # The trainer names the place that others share with it.
    processes.sort(key=lambda each: each[0] is not Process.trainer)
    lead = processes[0][0]
    width = plan.per_engine if lead is Process.engine else 1
    threads = 1 if on_gpus else config.cluster.cpu_threads or 1
    return Slot(
        processes=tuple(processes),
        cpus=threads * max(len(processes), width),
        gpus=width if on_gpus else 0,
        pool=pool_of(config.cluster.pools, lead),
    )


def machines_of(pools: Mapping[str, PoolConfig]) -> list[Machine] | None:
    """As the settings describe them; None where they leave it to the cluster."""
    if not pools or any(None in (pool.machines, pool.cpus, pool.gpus) for pool in pools.values()):
        return None
    return [
        Machine(name=f"{name} {index}", pool=name, cpus=pool.cpus or 0, gpus=pool.gpus or 0)
        for name, pool in pools.items()
        for index in range(pool.machines or 0)
    ]


def fit(config: Config, machines: Sequence[Machine]) -> Placed:
    """Where everything goes. Raises ConfigError, with the arithmetic, when it does not fit."""
    if config.weights.transport is not None:
        return _fit(config, machines)
    try:
        return _fit(_with_transport(config, Transport.shm), machines)
    except ConfigError:
        # Adapters know no other way, and two processes on one GPU cannot talk through NCCL.
        if sends_adapters(config) or config.cluster.placement is Placement.colocated:
            raise
        return _fit(_with_transport(config, Transport.p2p), machines)


def _with_transport(config: Config, transport: Transport) -> Config:
    return replace(config, weights=replace(config.weights, transport=transport))


def _fit(config: Config, machines: Sequence[Machine]) -> Placed:
    _check_pools(config.cluster.pools, machines)
    on_gpus = any(machine.gpus for machine in machines)
    slots = slots_of(config, on_gpus=on_gpus)
    _check_sums(config, slots, machines)
    is_one_machine = needs_one_machine(config, on_gpus=on_gpus)
    pinned = {Process.trainer, Process.critic} | ({Process.engine} if is_one_machine else set())
    blocks = _blocks(config, slots, is_one_machine=is_one_machine)
    by_size = sorted(blocks, key=lambda block: (block.gpus, block.cpus), reverse=True)
    # Trainers first keeps their ranks together; where that leaves large engines no room, the largest go first.
    trainers_first = sorted(by_size, key=lambda block: Process.trainer not in block.kinds)
    found = _place(trainers_first, machines) or _place(by_size, machines)
    if found is None:
        raise ConfigError(_too_scattered(config, by_size, machines, is_one_machine=is_one_machine))
    return Placed(
        slots=tuple(slots),
        machines=tuple(found[index] for index in range(len(slots))),
        is_pinned=tuple(slot.kind in pinned for slot in slots),
        config=config,
    )


def describe(placed: Placed, machines: Sequence[Machine]) -> list[str]:
    """One line a machine that something is on: how much of it is taken, and by what."""
    lines = []
    for machine in machines:
        here = [slot for slot, name in zip(placed.slots, placed.machines, strict=True) if name == machine.name]
        if not here:
            continue
        taken = sum(slot.gpus for slot in here)
        share = f"{taken} of {machine.gpus} GPUs" if machine.gpus else f"{_cpus(here):g} of {machine.cpus:g} CPUs"
        numbers: dict[Process, list[int]] = defaultdict(list)
        for slot in here:
            for kind, index in slot.processes:
                numbers[kind].append(index)
        lines.append(f"{machine.name}: {share}; {', '.join(_numbered(kind, found) for kind, found in numbers.items())}")
    return lines


def _numbered(kind: Process, indices: list[int]) -> str:
    name = kind.value.replace("_", " ")
    runs = [(first, last) for first, last in _runs(sorted(indices))]
    return f"{name} " + " and ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _runs(indices: list[int]) -> Iterable[tuple[int, int]]:
    """First and last of each unbroken run. Example: [0, 1, 2, 5] -> (0, 2), (5, 5)"""
    start = 0
    for stop in range(1, len(indices) + 1):
        if stop == len(indices) or indices[stop] != indices[stop - 1] + 1:
            yield indices[start], indices[stop - 1]
            start = stop


@dataclass(kw_only=True, slots=True, frozen=True)
class _Block:
    """Slots, by their numbers, that must be on one machine."""

    members: tuple[int, ...]
    kinds: frozenset[Process]
    cpus: float
    gpus: int
    pool: str | None


def needs_one_machine(config: Config, *, on_gpus: bool) -> bool:
    """Whether weights get to the engines through what one machine has only: an engine on the GPU of a rank has that
    rank's machine anyway."""
    transport = transport_of(config)
    if transport is Transport.shm or sends_adapters(config):
        return not (on_gpus and config.cluster.placement is Placement.colocated)
    return transport is Transport.ipc


def _blocks(config: Config, slots: Sequence[Slot], *, is_one_machine: bool) -> list[_Block]:
    def key(number: int) -> tuple[str, int]:
        kind, index = slots[number].processes[0]
        if is_one_machine and kind in (Process.engine, Process.trainer):
            return "", 0
        if kind in (Process.trainer, Process.critic):
            return kind.value, index // config.trainer.tensor_parallel
        return kind.value, index

    members: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number in range(len(slots)):
        members[key(number)].append(number)
    return [
        _Block(
            members=tuple(numbers),
            kinds=frozenset(slots[number].kind for number in numbers),
            cpus=_cpus([slots[number] for number in numbers]),
            gpus=sum(slots[number].gpus for number in numbers),
            pool=slots[numbers[0]].pool,
        )
        for numbers in members.values()
    ]


def _place(blocks: Sequence[_Block], machines: Sequence[Machine]) -> dict[int, str] | None:
    """Number of a slot -> its machine; None where a block finds no room."""
    cpus = {machine.name: machine.cpus for machine in machines}
    gpus = {machine.name: machine.gpus for machine in machines}
    found: dict[int, str] = {}
    last: dict[frozenset[Process], str] = {}
    for block in blocks:
        room = {
            machine.name: (gpus[machine.name], cpus[machine.name])
            for machine in machines
            if block.pool in (None, machine.pool)
            and gpus[machine.name] >= block.gpus
            and cpus[machine.name] >= block.cpus - 1e-6
        }
        if not room:
            return None
        have_neighbours = bool(block.kinds & {Process.trainer, Process.critic})
        # Ranks fill a machine that begins empty; what is alone goes where it leaves least.
        chosen = max(room, key=room.__getitem__) if have_neighbours else min(room, key=room.__getitem__)
        if have_neighbours and last.get(block.kinds) in room:
            chosen = last[block.kinds]
        last[block.kinds] = chosen
        gpus[chosen] -= block.gpus
        cpus[chosen] -= block.cpus
        found |= dict.fromkeys(block.members, chosen)
    return found


def _cpus(slots: Iterable[Slot]) -> float:
    return round(sum(slot.cpus for slot in slots), 4)


def _check_pools(pools: Mapping[str, PoolConfig], machines: Sequence[Machine]) -> None:
    """Whether the cluster has the machines that the settings describe."""
    for name, pool in pools.items():
        here = [machine for machine in machines if machine.pool == name]
        wanted = pool.machines or 1
        for what, size, of in (("gpus", pool.gpus, _gpus_of), ("cpus", pool.cpus, _cpus_of)):
            if size is not None and (short := [each for each in here if of(each) < size]):
                raise ConfigError(
                    f"cluster.pools.{name}.{what} is {size}, but the machine {short[0].name} has {of(short[0]):g}; "
                    f"lower it, or start Ray there with more"
                )
        if len(here) < wanted:
            raise ConfigError(
                f"cluster.pools.{name} has {len(here)} of the {wanted} machines that it needs: nodes of the cluster "
                f"with the label rlflow-pool={name}; start them with `ray start --labels rlflow-pool={name}`"
            )


def _gpus_of(machine: Machine) -> float:
    return machine.gpus


def _cpus_of(machine: Machine) -> float:
    return machine.cpus


def _check_sums(config: Config, slots: Sequence[Slot], machines: Sequence[Machine]) -> None:
    """Raise ConfigError where a pool has too few GPUs or CPUs in all."""
    for pool in dict.fromkeys(slot.pool for slot in slots):
        wanted = [slot for slot in slots if slot.pool == pool]
        here = [machine for machine in machines if machine.pool == pool or pool is None]
        needed, found = sum(slot.gpus for slot in wanted), sum(machine.gpus for machine in here)
        if needed > found:
            raise ConfigError(
                f"{_who(pool)} needs {needed} GPUs ({_terms(config, wanted, lambda slot: slot.gpus)}); "
                f"{_whose(pool)} {_has(here, _gpus_of, 'GPU')}; {_cure_gpus(config)}"
            )
        cpus, has = _cpus(wanted), sum(machine.cpus for machine in here)
        if cpus > has:
            raise ConfigError(
                f"{_who(pool)} needs {cpus:g} CPUs ({_terms(config, wanted, lambda slot: slot.cpus)}); "
                f"{_whose(pool)} {_has(here, _cpus_of, 'CPU')}; add machines, or lower "
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
    sums: dict[Process, float] = defaultdict(float)
    for slot in slots:
        sums[slot.kind] += of(slot)
    return ", ".join(f"{_SETTINGS[kind]} = {total:g}" for kind, total in sums.items() if total >= 1)


def _cure_gpus(config: Config) -> str:
    has_roles = gpu_plan(config).counts.keys() - {Process.engine, Process.trainer}
    is_shared = config.cluster.roles is Roles.shared
    return "lower one of them" + (", or set cluster.roles=shared" if has_roles and not is_shared else "")


def _too_scattered(
    config: Config, blocks: Sequence[_Block], machines: Sequence[Machine], *, is_one_machine: bool
) -> str:
    """There is enough in all, but not for a block on any one machine."""
    on_gpus = any(block.gpus for block in blocks)
    unit = "GPUs" if on_gpus else "CPUs"
    sizes = _sizes(machines, _gpus_of if on_gpus else _cpus_of)
    largest = blocks[0]
    amount = largest.gpus if on_gpus else largest.cpus
    if is_one_machine and Process.trainer in largest.kinds:
        transport = transport_of(config)
        way, cure = f"weights.transport={transport.value}", "weights.transport=p2p"
        if transport is Transport.ipc:
            cure = "weights.transport=shm"
        if sends_adapters(config):
            way, cure = "lora.send=adapters", "lora.send=merged and weights.transport=disk"
        return (
            f"{way} needs the trainer and all engines on one machine, with {amount:g} {unit}; of the cluster's "
            f"machines, {sizes}; set {cure}"
        )
    parts = ", ".join(f"{_NAMES[kind]} {amount:g}" for kind, amount in _largest(blocks, on_gpus=on_gpus).items())
    return (
        f"the {unit} of the cluster are enough, but not those of each machine ({sizes}); the processes need on one "
        f"machine each: {parts}; lower rollout.tensor_parallel, or have machines with more {unit}"
    )


def _largest(blocks: Sequence[_Block], *, on_gpus: bool) -> dict[Process, float]:
    found: dict[Process, float] = {}
    for block in blocks:
        for kind in block.kinds:
            found[kind] = max(found.get(kind, 0), block.gpus if on_gpus else block.cpus)
    return {kind: amount for kind, amount in found.items() if amount >= 1}


_SETTINGS = {
    Process.engine: "rollout.engines x rollout.tensor_parallel",
    Process.trainer: "trainer.ranks",
    Process.critic: "critic",
    Process.reference: "reference",
    Process.reward_model: "reward.model_replicas",
    Process.runner: "runners",
    Process.reward: "rewards",
}
_NAMES = {
    Process.engine: "an engine",
    Process.trainer: "the trainer's neighbouring ranks",
    Process.critic: "the critic's neighbouring ranks",
    Process.reference: "the reference",
    Process.reward_model: "a reward model",
    Process.runner: "a runner",
    Process.reward: "the rewards",
}
