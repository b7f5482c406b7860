"""The transport on one GPU, and between those of one machine, in an engine's worker: it reads the trainer's memory.

handles from the store -> plan, for this worker alone -> copies out of one rank's memory after the other -> targets
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlflow.errors import RunError
from rlflow.weights.ipc.sender import Handle, SharedPart, open_shared, part_from_json, part_key, tensors_in
from rlflow.weights.learn.tracing import Landings, layout_of
from rlflow.weights.p2p.exchange import Arrivals, source_view, target_view
from rlflow.weights.p2p.trainer_store import TrainerStore
from rlflow.weights.shape.layout import Engine, Layout
from rlflow.weights.shape.plan import Move, plan


def device_id(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharedReceiver:
    """Of one worker, for one version after the other: `open`, then `receive` each bucket, which is one rank's part."""

    def __init__(
        self,
        trainer: TrainerStore,
        source: Layout,
        gpu: str,
        targets: Mapping[str, Tensor],
        landings: Landings,
        landed: Callable[[str], None],
        open_memory: Callable[[Handle], Tensor] = open_shared,
    ) -> None:
        """`gpu` is the worker's `device_id`; see `PeerReceiver` for the others."""
        self._trainer = trainer
        self._source = source
        self._gpu = gpu
        self._targets = targets
        self._landings = landings
        self._landed = landed
        self._open_memory = open_memory
        self._moves: dict[int, list[Move]] | None = None
        self._parts: list[SharedPart] = []
        self._arrivals = Arrivals((), ())
        self._version = -1

    def open(self, version: int, transfer: int) -> int:
        """Read where the ranks have staged their parts; the number of buckets to receive."""
        self._version = version
        ranks = range(self._source.num_ranks)
        self._parts = [part_from_json(self._trainer.store.get(part_key(rank))) for rank in ranks]
        if self._moves is None:
            self._moves = self._plan()
        moves = [move for found in self._moves.values() for move in found]
        self._arrivals = Arrivals(self._source.placements, moves)
        for parameter in self._arrivals.without_moves():
            self._landed(parameter)
        return len(self._moves)

    @torch.no_grad()
    def receive(self, bucket: int) -> int | None:
        """Copy what one rank holds; the version that the trainer has, where it is another one by now."""
        if self._moves is None:
            raise RunError("a version is opened before its buckets are received")
        source, moves = list(self._moves.items())[bucket]
        part = self._parts[source]
        if part.version != self._version:
            return part.version
        memory = self._open_memory(part.handle)
        tensors = tensors_in(part, memory)
        for move in moves:
            target_view(self._targets[move.tensor], move).copy_(source_view(tensors[move.source_tensor], move))
        if memory.device.type == "cuda":
            # Both devices: a copy between two may wait on either.
            torch.cuda.synchronize(memory.device)
            torch.cuda.synchronize()
        for parameter in self._arrivals.arrived(moves):
            self._landed(parameter)
        return None

    def give_up(self) -> None:
        """Nothing to tell the trainer: it does not wait for engines."""

    def close(self) -> None:
        self._parts = []

    def _plan(self) -> dict[int, list[Move]]:
        """What is copied from each rank; first from the one on this worker's GPU."""
        shapes = {name: place.shape for name, place in self._source.placements.items()}
        wanted = layout_of(shapes, self._parts[0].dtype, [self._landings])
        gpus = [part.handle.gpu for part in self._parts]
        devices = (gpus.index(self._gpu),) if self._gpu in gpus else None
        # In one bucket: there are no messages whose size would have to be bounded.
        made = plan(self._source, [Engine(layout=wanted, devices=devices)], bucket_bytes=2**62)
        moves: dict[int, list[Move]] = {}
        for move in sorted(made.moves(), key=lambda move: (not move.is_local, move.source)):
            moves.setdefault(move.source, []).append(move)
        return moves
