"""Which process runs on which machine, and whether they all fit. Pure: a dry run can ask too, because no Ray is
imported.

    config -> slots -> blocks, largest first -> a machine for each block -> runners beside the engines -> Placed
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby

from rlflow.cluster.fit_errors import check_sizes, check_sums, no_room, too_scattered
from rlflow.cluster.slots import (
    SLIVER,
    Machine,
    Slot,
    SlotBlock,
    blocks_of,
    cpus_of,
    machines_of,
    needs_one_machine,
    num_waiting,
    slots_of,
    waiting_slots,
)
from rlflow.config import Config, ProcessKind
from rlflow.errors import ConfigError
from rlflow.runtime.derived import TransportChoice, sends_adapters, transports_for
from rlflow.settings.cluster_checks import pool_of

WAITING = (ProcessKind.runner, ProcessKind.reward)
"""What mostly waits, and is spread over the machines of the engines."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Placed:
    slots: tuple[Slot, ...]
    machines: tuple[str, ...]
    """The machine of each slot."""
    is_pinned: tuple[bool, ...]
    """Whether a slot must stay there: ranks of the trainer are neighbours, and some transports need one machine. The
    others may be anywhere in their pool, and may move when their machine is lost."""
    config: Config
    """The settings of the run, with weights.transport decided."""
    way: TransportChoice | None = None
    """Why it was decided so; None if the settings name it."""


def fit(config: Config, machines: Sequence[Machine]) -> Placed:
    """Where everything goes. Raises ConfigError, with the arithmetic, when it does not fit."""
    if config.weights.transport is not None:
        return _fit(config, machines)
    *others, last = transports_for(config, on_gpus=any(machine.gpus for machine in machines))
    for way in others:
        try:
            return _fit_by(way, config, machines)
        except ConfigError:
            continue  # the run does not fit in this way; the last one says why it fits in none
    return _fit_by(last, config, machines)


def _fit_by(way: TransportChoice, config: Config, machines: Sequence[Machine]) -> Placed:
    chosen = replace(config, weights=replace(config.weights, transport=way.transport))
    return replace(_fit(chosen, machines), way=way)


def _fit(config: Config, machines: Sequence[Machine]) -> Placed:
    check_sizes(config.cluster.pools, machines)
    on_gpus = any(machine.gpus for machine in machines)
    slots = slots_of(config, on_gpus=on_gpus)
    check_sums(config, [*slots, *_one_of_each(config)], machines)
    is_one_machine = needs_one_machine(config, on_gpus=on_gpus)
    pinned = {ProcessKind.trainer, ProcessKind.critic} | ({ProcessKind.engine} if is_one_machine else set())
    blocks = blocks_of(config, slots, is_one_machine=is_one_machine)
    by_size = sorted(blocks, key=lambda block: (block.gpus, block.cpus), reverse=True)
    # Trainers first keeps their ranks together; if that leaves large engines no room, the largest go first.
    trainers_first = sorted(by_size, key=lambda block: ProcessKind.trainer not in block.kinds)
    found = _place(trainers_first, machines) or _place(by_size, machines)
    if found is None:
        raise ConfigError(too_scattered(config, by_size, machines, is_one_machine=is_one_machine))
    places = [found[index] for index in range(len(slots))]
    spread = _spread(config, slots, places, machines)
    slots += [slot for slot, _ in spread]
    places += [name for _, name in spread]
    return Placed(
        slots=tuple(slots),
        machines=tuple(places),
        is_pinned=tuple(slot.kind in pinned for slot in slots),
        config=config,
    )


def _one_of_each(config: Config) -> list[Slot]:
    """The fewest slots of what mostly waits."""
    return [slot for kind in WAITING for slot in waiting_slots(config, kind, min(1, num_waiting(config, kind, 1)))]


def _spread(
    config: Config, slots: Sequence[Slot], places: Sequence[str], machines: Sequence[Machine]
) -> list[tuple[Slot, str]]:
    """Runners and actors that score, each with its machine.

    So that neither they nor the processes that they start crowd one machine, they are where engines are; in a pool
    without engines, on all of its machines; else on as many as have engines. Raises ConfigError if no machine has room
    for one of a kind.
    """
    free, engines = {machine.name: machine.cpus for machine in machines}, set[str]()
    for slot, name in zip(slots, places, strict=True):
        free[name] -= slot.cpus
        if any(kind is ProcessKind.engine for kind, _ in slot.processes):
            engines.add(name)
    found: list[tuple[Slot, str]] = []
    for kind in WAITING:
        if not num_waiting(config, kind, 1):
            continue
        pool = pool_of(config.cluster.pools, kind)
        there = [each.name for each in machines if pool in (None, each.pool) and free[each.name] >= SLIVER - 1e-6]
        if not there:
            raise ConfigError(no_room(kind, pool, SLIVER))
        elsewhere = there if pool is not None else sorted(there, key=free.__getitem__)[: max(1, len(engines))]
        names = [name for name in there if name in engines] or elsewhere
        waiting = waiting_slots(config, kind, num_waiting(config, kind, len(names)))
        for number, (slot, name) in enumerate(zip(waiting, cycle(names), strict=False)):
            if number >= len(names) and free[name] < 2 * SLIVER - 1e-6:
                break  # each machine has one, more would only be faster, and the last sliver is for the rewards
            free[name] -= slot.cpus
            found.append((slot, name))
    return found


def machines_taken(config: Config) -> list[str]:
    """One line for each machine of cluster.pools; [] when the pools leave machines to the cluster.

    Raises ConfigError, with the arithmetic, when the run does not fit on them.
    """
    machines = machines_of(config.cluster.pools)
    return [] if machines is None else describe(fit(config, machines), machines)


def describe(placed: Placed, machines: Sequence[Machine]) -> list[str]:
    """One line for each machine in use: how much of it is taken, and by what."""
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
        processes = [f"{kind.value.replace('_', ' ')} {_ranges(found)}" for kind, found in numbers.items()]
        lines.append(f"{machine.name}: {share}; {', '.join(processes)}")
    return lines


def describe_way(placed: Placed) -> list[str]:
    """How weights travel, and why; [] if the settings say it, or adapters are sent alone."""
    if placed.way is None or sends_adapters(placed.config):
        return []
    return [f"weights.transport={placed.way.transport.value}: {placed.way.reason}"]


def _ranges(numbers: list[int]) -> str:
    """Example: [0, 1, 2, 5] -> "0-2 and 5"."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])  # which is equal within a range
    found = [[number for _, number in run] for _, run in runs]
    return " and ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _place(blocks: Sequence[SlotBlock], machines: Sequence[Machine]) -> dict[int, str] | None:
    """Number of a slot -> its machine; None when a block finds no room."""
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
        # Ranks go where most is free, beside their neighbours; anything else goes where it leaves least free.
        chosen = max(room, key=room.__getitem__) if have_neighbours else min(room, key=room.__getitem__)
        if have_neighbours and last.get(block.kinds) in room:
            chosen = last[block.kinds]
        last[block.kinds] = chosen
        gpus[chosen] -= block.gpus
        cpus[chosen] -= block.cpus
        found |= dict.fromkeys(block.members, chosen)
    return found
