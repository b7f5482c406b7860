"""Bytes of main memory that the processes of a run take on each machine of cluster.pools. Pure arithmetic.

    Placed, what GPUs hold -> for each machine, items -> HostMemory, beside the memory of its pod

Pages of files count for no process, because the kernel gives them back. What a process takes before it does anything is
an estimate: torch with CUDA's libraries, and what vLLM adds.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.placement import Placed
from rlflow.config import Config, Placement, ProcessKind, Transport
from rlflow.environments.pool import processes_of_runner
from rlflow.runtime.derived import transport_of
from rlflow.tools.dry_run.memory import Item, ProcessMemory, size

GIB = 2**30
BASE = {
    ProcessKind.engine: 4 * GIB,
    ProcessKind.runner: GIB,
    ProcessKind.reward: GIB // 2,
}
"""What a process takes by itself; an engine is vLLM's front, its core, and a worker for each GPU."""
COMPUTING = 3 * GIB
"""The same of a rank of any model, of a reward model, and of each worker of an engine."""
CODE_PROCESS = GIB // 4
"""A process of environments or rewards, before the code that it is given takes anything."""
RAY = GIB
"""Ray's own processes on a machine."""
COPIED = re.compile("parameters|adapters|moments.*")
"""The items of a rank that a checkpoint copies."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostMemory:
    """What the processes on one machine of a pool take."""

    pool: str
    items: tuple[Item, ...]
    limit: int | None
    """Bytes of the pod; None if cluster.pools.*.memory_gb is not given."""

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def is_enough(self) -> bool:
        return self.limit is None or self.total <= self.limit


def host_memory(
    config: Config,
    placed: Placed,
    processes: Mapping[ProcessKind, ProcessMemory],
    *,
    loading: int,
    converted: int,
    staged: int,
) -> tuple[HostMemory, ...]:
    """What the machine of each pool takes that takes most.

    `loading` is what a rank takes while it loads, `converted` what rank 0 takes besides; `staged` is a version of the
    weights.
    """
    here: dict[str, list[tuple[ProcessKind, int]]] = {}
    for slot, name in zip(placed.slots, placed.machines, strict=True):
        here.setdefault(name, []).extend(slot.processes)
    everywhere = Counter(slot.kind for slot in placed.slots)
    held = gpu_plan(config).counts.get(ProcessKind.teacher, 0)  # teachers behind URLs have the numbers above
    found: dict[str, list[HostMemory]] = {}
    for name, there in here.items():
        own = [(kind, index) for kind, index in there if kind is not ProcessKind.teacher or index < held]
        pool = name.rpartition(" ")[0]
        limit = config.cluster.pools[pool].memory_gb
        items = [Item(name="Ray", num_bytes=RAY, note="its own processes")]
        items += _playing(config, own, everywhere)
        items += _training(config, own, processes[ProcessKind.trainer], loading, converted, staged)
        found.setdefault(pool, []).append(
            HostMemory(
                pool=pool,
                items=tuple(item for item in items if item.num_bytes),
                limit=None if limit is None else int(limit * GIB),
            )
        )
    return tuple(max(machines, key=lambda each: each.total) for machines in found.values())


def _playing(
    config: Config, here: Sequence[tuple[ProcessKind, int]], everywhere: Mapping[ProcessKind, int]
) -> list[Item]:
    """`everywhere`: how many processes of each kind all machines have."""
    counts = Counter(kind for kind, _ in here)
    engines, runners, rewards = (counts[kind] for kind in BASE)
    parallel = config.rollout.tensor_parallel
    hosted = runners * processes_of_runner(config.env.processes, max(1, runners))
    scoring = rewards * -(-config.reward.workers // max(1, everywhere[ProcessKind.reward]))
    store = int(config.staleness.max_ready_mb * 2**20) * runners // everywhere[ProcessKind.runner]
    return [
        Item(
            name="engines",
            num_bytes=engines * (BASE[ProcessKind.engine] + parallel * COMPUTING),
            note=f"{engines} of vLLM, on {parallel} GPUs each",
        ),
        Item(
            name="runners",
            num_bytes=runners * BASE[ProcessKind.runner] + hosted * CODE_PROCESS,
            note=f"{runners}, with processes of environments: {hosted}",
        ),
        Item(
            name="rewards",
            num_bytes=rewards * BASE[ProcessKind.reward] + scoring * CODE_PROCESS,
            note=f"{rewards}, with processes that score: {scoring}",
        ),
        Item(name="object store", num_bytes=store, note="a share of staleness.max_ready_mb"),
    ]


def _training(
    config: Config,
    here: Sequence[tuple[ProcessKind, int]],
    trainer: ProcessMemory,
    loading: int,
    converted: int,
    staged: int,
) -> list[Item]:
    ranks = sum(kind not in BASE for kind, _ in here)
    trained = sum(kind in (ProcessKind.trainer, ProcessKind.critic) for kind, _ in here)
    copied = sum(item.num_bytes for item in trainer.items if COPIED.fullmatch(item.name))
    is_parked = config.cluster.placement is Placement.colocated
    is_shared = config.rollout.engines and trained and transport_of(config) is Transport.shm
    is_first = (ProcessKind.trainer, 0) in here
    return [
        Item(name="ranks", num_bytes=ranks * COMPUTING, note=f"{ranks} processes with torch and CUDA"),
        Item(name="loading", num_bytes=ranks * loading, note="a part of a parameter for each rank, at the start"),
        Item(name="conversion", num_bytes=converted * is_first, note="rank 0 loads this family whole, at the start"),
        Item(
            name="checkpoint",
            num_bytes=trained * copied if config.run.checkpoint_every else 0,
            note="a copy of what is being written",
        ),
        Item(name="parked ranks", num_bytes=trained * trainer.kept * is_parked, note="while engines sample"),
        Item(name="weights", num_bytes=staged if is_shared else 0, note="a version in shared memory"),
    ]


def too_much(found: Sequence[HostMemory]) -> list[str]:
    """One line for each pool whose pods have too little memory."""
    return [
        f"cluster.pools.{each.pool}.memory_gb is {(each.limit or 0) / GIB:g}, but the processes on one machine take "
        f"about {size(each.total)} of main memory ({', '.join(f'{i.name} {size(i.num_bytes)}' for i in _largest(each))}"
        "); raise it, or have more machines"
        for each in found
        if not each.is_enough
    ]


def _largest(memory: HostMemory) -> list[Item]:
    return sorted(memory.items, key=lambda item: -item.num_bytes)[:3]
