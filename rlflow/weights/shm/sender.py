"""The shared-memory transport in a rank of the trainer: all ranks write their own parts of the parameters at once.

what each rank holds -> arena on the machine -> StagedWeights;  engines map it, see `receiver`

Nothing is gathered, as long as all ranks are on one machine and a parameter's elements are on the ranks as the engines
take them. Otherwise, as with adapters that have to be merged first, the ranks gather, and on each machine one of them
writes: engines find every version in the memory of their own machine, if a rank is on it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.roles import StagedWeights
from rlflow.weights.p2p.exchange import source_view, target_view
from rlflow.weights.shape.layout import EngineLayout, mesh_layout
from rlflow.weights.shape.plan import Move, plan
from rlflow.weights.shm.arena import Arena, TensorSpec, arena_path, lay_out, tensor_at

if TYPE_CHECKING:
    from rlflow.weights.source import WeightSource


class AdapterSender:
    """Adapters alone, which are small: the ranks gather them. Every method but `close` is collective."""

    def __init__(self, backend: WeightSource, rank: int, world_size: int, folder: Path = Path("/dev/shm")) -> None:
        """Raises ConfigError when `folder` has too little room."""
        self._backend = backend
        self._rank = rank
        self._arena = _arenas(backend, backend.adapter_specs(), rank, world_size, folder).own

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's adapters as a version, in the engines' dtype; rank 0 is told where."""
        staged = stage_whole(self._arena, version, self._backend.adapter_parameters())
        return staged if self._rank == 0 else None

    def release(self) -> None:
        """It lies in the memory of the CPU."""

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()


def stage_whole(arena: Arena | None, version: int, named: Iterator[tuple[str, Tensor]]) -> StagedWeights | None:
    """Stage what the ranks gather while all of them go through `named`; for ranks without an arena, None."""
    if arena is not None:
        return arena.stage(version, named)
    for _ in named:
        pass
    return None


@dataclass(kw_only=True, slots=True, frozen=True)
class _Arenas:
    """Of all machines; they have the same path on each."""

    own: Arena | None
    """Of this rank, if it is the first one on its machine."""
    path: Path
    machines: int


def _arenas(backend: WeightSource, specs: Sequence[TensorSpec], rank: int, world_size: int, folder: Path) -> _Arenas:
    """Make them. Collective."""
    # A name that was never used: what a dead process has left must not be taken for it.
    label = f"{round(backend.add_up([float(secrets.randbits(52)) if rank == 0 else 0.0])[0]):013x}"
    path, own, machines = arena_path(folder, label), None, 0
    while True:
        flags = [0.0] * world_size
        flags[rank] = float(not path.exists())
        lacking = [other for other, lacks in enumerate(backend.add_up(flags)) if lacks]
        if not lacking:
            return _Arenas(own=own, path=path, machines=machines)
        machines += 1
        if lacking[0] == rank:
            own = Arena(specs, folder, label=label)
        # Nobody looks before it is there.
        backend.add_up([0.0])


class SharedMemorySender:
    """One rank's side. Every method but `close` is collective."""

    def __init__(self, backend: WeightSource, rank: int, world_size: int, folder: Path = Path("/dev/shm")) -> None:
        """Raises ConfigError when `folder` has too little room."""
        self._backend = backend
        self._rank = rank
        specs = backend.parameter_specs()
        self._slots = {slot.name: slot for slot in lay_out(specs)[0]}
        arenas = _arenas(backend, specs, rank, world_size, folder)
        self._arena = arenas.own
        self._moves: dict[str, list[Move]] | None = None
        if arenas.machines == 1:
            self._shared = self._arena.memory if self._arena is not None else _map(arenas.path)
            self._moves = self._own_moves(world_size)

    @property
    def gathers(self) -> bool:
        """Whether one rank of each machine writes everything."""
        return self._moves is None

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's weights as a version, in the engines' dtype; rank 0 is told where."""
        if self._moves is None:
            staged = stage_whole(self._arena, version, self._backend.full_parameters())
            return staged if self._rank == 0 else None
        if self._arena is not None:
            self._arena.begin(version)
        self._meet()
        self._write(self._moves)
        self._meet()
        return self._arena.finish(version) if self._arena is not None else None

    def release(self) -> None:
        """It lies in the memory of the CPU."""

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()

    @torch.no_grad()
    def _write(self, moves: dict[str, list[Move]]) -> None:
        for name, held in self._backend.held():
            for move in moves.get(name, ()):
                target = tensor_at(self._shared, self._slots[move.parameter])
                target_view(target, move).copy_(source_view(held, move))

    def _own_moves(self, world_size: int) -> dict[str, list[Move]] | None:
        """What this rank writes, by the name of its own tensor; None where ranks have to gather."""
        source = self._backend.layout()
        if source is None:
            return None
        assert source.num_ranks == world_size
        dtype = next(iter(self._slots.values())).dtype
        whole = EngineLayout(layout=mesh_layout(source.shapes, dtype, 1, lambda name: ((1, None),)))
        moves: dict[str, list[Move]] = defaultdict(list)
        # In one bucket: there are no messages whose size would have to be bounded.
        for move in plan(source, [whole], bucket_bytes=8 * source.num_bytes).moves_from(self._rank):
            moves[move.source_tensor].append(move)
        return moves

    def _meet(self) -> None:
        """Return when all ranks have come here."""
        self._backend.add_up([0.0])


def _map(path: Path) -> Tensor:
    """The bytes of another rank's arena, to write to."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)
