"""Which process is on which machine, and whether they all fit. Pure: imports no Ray, so that a dry run can ask too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlflow.cluster.misfit import check_sizes, check_sums, too_scattered
from rlflow.cluster.slots import Block, Machine, Slot, blocks_of, cpus_of, machines_of, needs_one_machine, slots_of
from rlflow.config import Config, Placement, ProcessKind, Transport
from rlflow.errors import ConfigError


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


def fit(config: Config, machines: Sequence[Machine]) -> Placed:
    """Where everything goes. Raises ConfigError, with the arithmetic, when it does not fit."""
    if config.weights.transport is not None:
        return _fit(config, machines)
    try:
        return _fit(_with_transport(config, Transport.shm), machines)
    except ConfigError:
        # No rank has a part of what is merged, and two processes on one GPU cannot talk through NCCL.
        if config.lora.rank is not None or config.cluster.placement is Placement.colocated:
            raise
        return _fit(_with_transport(config, Transport.p2p), machines)


def _with_transport(config: Config, transport: Transport) -> Config:
    return replace(config, weights=replace(config.weights, transport=transport))


def _fit(config: Config, machines: Sequence[Machine]) -> Placed:
    check_sizes(config.cluster.pools, machines)
    on_gpus = any(machine.gpus for machine in machines)
    slots = slots_of(config, on_gpus=on_gpus)
    check_sums(config, slots, machines)
    is_one_machine = needs_one_machine(config, on_gpus=on_gpus)
    pinned = {ProcessKind.trainer, ProcessKind.critic} | ({ProcessKind.engine} if is_one_machine else set())
    blocks = blocks_of(config, slots, is_one_machine=is_one_machine)
    by_size = sorted(blocks, key=lambda block: (block.gpus, block.cpus), reverse=True)
    # Trainers first keeps their ranks together; where that leaves large engines no room, the largest go first.
    trainers_first = sorted(by_size, key=lambda block: ProcessKind.trainer not in block.kinds)
    found = _place(trainers_first, machines) or _place(by_size, machines)
    if found is None:
        raise ConfigError(too_scattered(config, by_size, machines, is_one_machine=is_one_machine))
    return Placed(
        slots=tuple(slots),
        machines=tuple(found[index] for index in range(len(slots))),
        is_pinned=tuple(slot.kind in pinned for slot in slots),
        config=config,
    )


def machines_taken(config: Config) -> list[str]:
    """One line a machine of cluster.pools; none where they leave it to the cluster how many there are.

    Raises ConfigError, with the arithmetic, when the run does not fit on them.
    """
    machines = machines_of(config.cluster.pools)
    return [] if machines is None else describe(fit(config, machines), machines)


def describe(placed: Placed, machines: Sequence[Machine]) -> list[str]:
    """One line a machine that something is on: how much of it is taken, and by what."""
    lines = []
    for machine in machines:
        here = [slot for slot, name in zip(placed.slots, placed.machines, strict=True) if name == machine.name]
        if not here:
            continue
        taken = sum(slot.gpus for slot in here)
        share = f"{taken} of {machine.gpus} GPUs" if machine.gpus else f"{cpus_of(here):g} of {machine.cpus:g} CPUs"
        numbers: dict[ProcessKind, list[int]] = defaultdict(list)
        for slot in here:
            for kind, index in slot.processes:
                numbers[kind].append(index)
        lines.append(f"{machine.name}: {share}; {', '.join(_numbered(kind, found) for kind, found in numbers.items())}")
    return lines


def _numbered(kind: ProcessKind, indices: list[int]) -> str:
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


def _place(blocks: Sequence[Block], machines: Sequence[Machine]) -> dict[int, str] | None:
    """Number of a slot -> its machine; None where a block finds no room."""
    cpus = {machine.name: machine.cpus for machine in machines}
    gpus = {machine.name: machine.gpus for machine in machines}
    found: dict[int, str] = {}
    last: dict[frozenset[ProcessKind], str] = {}
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
        have_neighbours = bool(block.kinds & {ProcessKind.trainer, ProcessKind.critic})
        # Ranks fill a machine that begins empty; what is alone goes where it leaves least.
        chosen = max(room, key=room.__getitem__) if have_neighbours else min(room, key=room.__getitem__)
        if have_neighbours and last.get(block.kinds) in room:
            chosen = last[block.kinds]
        last[block.kinds] = chosen
        gpus[chosen] -= block.gpus
        cpus[chosen] -= block.cpus
        found |= dict.fromkeys(block.members, chosen)
    return found
