"""The shared-memory transport in a rank of the trainer: all ranks write their own parts of the parameters at once.

what each rank holds -> arena that rank 0 owns -> StagedWeights;  engines map it, see `receiver`

Nothing is gathered, as long as all ranks are on one machine and a parameter's elements are on the ranks as the engines
take them. Otherwise, as with adapters that have to be merged first, the ranks gather and rank 0 writes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.roles import StagedWeights
from rlflow.weights.arena import Arena, arena_path, lay_out, tensor_at
from rlflow.weights.exchange import source_view, target_view
from rlflow.weights.layout import Engine, mesh_layout
from rlflow.weights.plan import Move, plan

if TYPE_CHECKING:
    from rlflow.workers.trainer.base import TrainerBackend


class AdapterSender:
    """Adapters alone, which are small: the ranks gather them, and rank 0 writes. Every method but `close` is
    collective."""

    def __init__(self, backend: TrainerBackend, rank: int, folder: Path = Path("/dev/shm")) -> None:
        """Raises ConfigError when `folder` has too little room."""
        self._backend = backend
        self._arena = Arena(backend.adapter_specs(), folder) if rank == 0 else None

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's adapters as a version, in the engines' dtype; rank 0 is told where."""
        return stage_whole(self._arena, version, self._backend.adapter_parameters())

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


class SharedMemorySender:
    """One rank's side. Every method but `close` is collective."""

    def __init__(
        self, backend: TrainerBackend, rank: int, world_size: int, rendezvous: str, folder: Path = Path("/dev/shm")
    ) -> None:
        """`rendezvous` is where these ranks met; no other trainer has met there.

        Raises ConfigError when `folder` has too little room.
        """
        self._backend = backend
        self._rank = rank
        specs = backend.parameter_specs()
        self._slots = {slot.name: slot for slot in lay_out(specs)[0]}
        # All ranks know the name beforehand; a rank that is alone has met nobody.
        label = hashlib.sha256(rendezvous.encode()).hexdigest()[:32] if world_size > 1 else uuid.uuid4().hex
        self._arena = Arena(specs, folder, label=label) if rank == 0 else None
        self._meet()
        self._shared = self._arena.memory if self._arena is not None else _map(arena_path(folder, label))
        self._moves = self._own_moves(world_size) if self._all_have(world_size, self._shared is not None) else None

    @property
    def gathers(self) -> bool:
        """Whether rank 0 writes everything."""
        return self._moves is None

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's weights as a version, in the engines' dtype; rank 0 is told where."""
        if self._moves is None:
            return stage_whole(self._arena, version, self._backend.full_parameters())
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
        assert self._shared is not None
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
        shapes = {name: place.shape for name, place in source.placements.items()}
        dtype = next(iter(self._slots.values())).dtype
        whole = Engine(layout=mesh_layout(shapes, dtype, 1, lambda name: ((1, None),)))
        moves: dict[str, list[Move]] = defaultdict(list)
        # In one bucket: there are no messages whose size would have to be bounded.
        for move in plan(source, [whole], bucket_bytes=8 * source.num_bytes).moves_from(self._rank):
            moves[move.source_tensor].append(move)
        return moves

    def _all_have(self, world_size: int, is_true: bool) -> bool:
        found = self._backend.add_up([float(is_true), 1.0])
        return found[0] == found[1]

    def _meet(self) -> None:
        """Return when all ranks have come here."""
        self._backend.add_up([0.0])


def _map(path: Path) -> Tensor | None:
    """The bytes of another rank's arena, to write to; None where it is not to be seen from this machine."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)
