"""The shared-memory transport in a rank of the trainer: all ranks write their own parts of the parameters at once.

what each rank holds -> arena on the machine -> StagedWeights;  engines map it, see `receiver`

Nothing is gathered, as long as all ranks are on one machine and a parameter's elements are on the ranks as the engines
take them. Otherwise, as with adapters that have to be merged first, the ranks gather, and on each machine one of them
writes: engines find every version in the memory of their own machine, if a rank is on it.
"""

import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlflow.roles import StagedWeights
from rlflow.runtime import scratch
from rlflow.weights.p2p.exchange import source_view, target_view
from rlflow.weights.shape.landings import layout_of, whole_landings
from rlflow.weights.shape.layout import EngineLayout
from rlflow.weights.shape.plan import Move, plan
from rlflow.weights.shm.arena import Arena, lay_out, tensor_at
from rlflow.weights.source import Specs, WeightSender, WeightSource


class AdapterSender(WeightSender):
    """Adapters alone, which are small: the ranks gather them."""

    def __init__(self, backend: WeightSource, rank: int, world_size: int, folder: Path = Path("/dev/shm")) -> None:
        """Raises ConfigError when `folder` has too little room."""
        super().__init__(backend, rank)
        self._arena: Arena | None = None
        """This rank's, if it is the first one on its machine."""
        self._num_machines = 0
        # A name that was never used: what a dead process has left must not be taken for it.
        label = f"{round(backend.add_up([float(secrets.randbits(52)) if rank == 0 else 0.0])[0]):013x}"
        while True:
            found = next(folder.glob(f"*-{label}"), None)
            flags = [0.0] * world_size
            flags[rank] = float(found is None)
            lacking = [other for other, lacks in enumerate(backend.add_up(flags)) if lacks]
            if found is not None and not lacking:
                self._path = found
                return
            self._num_machines += 1
            if lacking[0] == rank:
                for left in folder.glob(f"{scratch.folder().name}-*"):
                    left.unlink(missing_ok=True)  # of a trainer that this one replaces
                self._arena = Arena(self._specs(), folder, label=label)
            self._meet()  # nobody looks before it is there

    def _specs(self) -> Specs:
        return self._backend.adapter_specs()

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's adapters as a version, in the engines' dtype; rank 0 is told where."""
        return self._stage_whole(version, self._backend.adapter_parameters())

    def _stage_whole(self, version: int, named: Iterator[tuple[str, Tensor]]) -> StagedWeights | None:
        """Gather, while all ranks go through `named`; those with an arena write it."""
        if self._arena is None:
            for _ in named:
                pass
            return None
        staged = self._arena.stage(version, named)
        return staged if self._rank == 0 else None

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()


class SharedMemorySender(AdapterSender):
    """Whole models: all ranks write their parts."""

    def __init__(self, backend: WeightSource, rank: int, world_size: int, folder: Path = Path("/dev/shm")) -> None:
        super().__init__(backend, rank, world_size, folder)
        self._slots = {slot.name: slot for slot in lay_out(self._specs())[0]}
        self._moves: dict[str, list[Move]] | None = None
        if self._num_machines == 1:
            self._shared = self._arena.memory if self._arena is not None else _map(self._path)
            self._moves = self._own_moves(world_size)

    def _specs(self) -> Specs:
        return self._backend.parameter_specs()

    @property
    def gathers(self) -> bool:
        """Whether one rank of each machine writes everything."""
        return self._moves is None

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's weights as a version, in the engines' dtype; rank 0 is told where."""
        if self._moves is None:
            return self._stage_whole(version, self._backend.full_parameters())
        if self._arena is not None:
            self._arena.begin(version)
        self._meet()
        with torch.no_grad():
            for name, held in self._backend.held():
                for move in self._moves.get(name, ()):
                    target = tensor_at(self._shared, self._slots[move.parameter])
                    target_view(target, move).copy_(source_view(held, move))
        self._meet()
        return self._arena.finish(version) if self._arena is not None else None

    def _own_moves(self, world_size: int) -> dict[str, list[Move]] | None:
        """What this rank writes, by the name of its own tensor; None if the ranks have to gather."""
        source = self._backend.layout()
        if source is None:
            return None
        assert source.num_ranks == world_size
        whole = EngineLayout(
            layout=layout_of(source.shapes, source.dtypes, [whole_landings(source.shapes, source.dtypes)])
        )
        moves: dict[str, list[Move]] = defaultdict(list)
        # In one bucket, because there are no messages whose size would have to be bounded.
        for move in plan(source, [whole], bucket_bytes=8 * source.num_bytes).moves_from(self._rank):
            moves[move.source_tensor].append(move)
        return moves


def _map(path: Path) -> Tensor:
    """The bytes of another rank's arena, to write to."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)
