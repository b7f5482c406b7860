"""The transport on one GPU, and between those of one machine, in an engine's worker: it reads the trainer's memory.

handles from the store -> plan, for this worker alone -> copies out of one rank's memory after the other -> targets

CUDA opens a context on each GPU whose memory a process reads. So only those are opened that hold what the worker keeps
and its own GPU does not: with FSDP2 all of them, with ranks that hold copies none. To do without, the ranks would have
to send each other buckets while the engines load: memory of two buckets instead of a context (about half a GB) for each
GPU, but then an engine that hangs holds up the others.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from rlflow.errors import RunError
from rlflow.weights.engine.messages import Opening
from rlflow.weights.engine.receiver import Destination, Receiver
from rlflow.weights.ipc.sender import SHARED_PART, Handle, SharedPart, open_shared, part_key, tensors_in
from rlflow.weights.p2p.exchange import Arrivals, source_view, target_view
from rlflow.weights.p2p.rendezvous import TrainerStore
from rlflow.weights.shape.landings import layout_of
from rlflow.weights.shape.layout import EngineLayout
from rlflow.weights.shape.plan import Move, plan


def device_id(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def near(held: Tensor, device: torch.device) -> Tensor:
    """What another GPU holds, whole, on this one, if it is a GPU that it goes to.

    One plain copy is the work of a copy engine. Strided copies would be kernels on the other GPU, which runs those of
    different processes one after another, and each process would load them there.
    """
    return held.to(device) if held.is_cuda and device.type == "cuda" else held


class SharedReceiver(Receiver):
    """Copies what this worker keeps; a bucket is the part of one rank of the trainer."""

    def __init__(
        self,
        destination: Destination,
        trainer: TrainerStore,
        gpu: str,
        open_memory: Callable[[Handle], Tensor] = open_shared,
    ) -> None:
        """`gpu` is the worker's `device_id`."""
        super().__init__(destination)
        self._trainer = trainer
        self._gpu = gpu
        self._open_memory = open_memory
        self._moves: dict[int, list[Move]] | None = None
        self._parts: list[SharedPart] = []
        self._arrivals = Arrivals((), ())
        self._version = -1

    def _ask(self, opening: Opening) -> int:
        """Read where the ranks have staged their parts."""
        self._version = opening.staged.version
        store, source = self._trainer.store, self._trainer.layout
        self._parts = [SHARED_PART.validate_json(store.get(part_key(rank))) for rank in range(source.num_ranks)]
        if self._moves is None:
            self._moves = self._plan()
        self._arrivals = Arrivals(source.placements, [move for found in self._moves.values() for move in found])
        for parameter in self._arrivals.without_moves():
            self._destination.landed(parameter)
        return len(self._moves)

    @torch.no_grad()
    def receive(self, bucket: int) -> int | None:
        """Copy what one rank holds. If the trainer has replaced the version, returns the one it has now."""
        if self._moves is None:
            raise RunError("a version is opened before its buckets are received")
        source, moves = list(self._moves.items())[bucket]
        part = self._parts[source]
        if part.version != self._version:
            return part.version
        memory = self._open_memory(part.handle)
        tensors, targets = tensors_in(part, memory), self._destination.targets
        device = next(iter(targets.values())).device
        for name, group in groupby(moves, key=lambda move: move.source_tensor):
            held = near(tensors[name], device)
            for move in group:
                target_view(targets[move.tensor], move).copy_(source_view(held, move))
        if memory.device.type == "cuda":
            # Both devices: a copy between two may wait on either.
            torch.cuda.synchronize(memory.device)
            torch.cuda.synchronize()
        for parameter in self._arrivals.arrived(moves):
            self._destination.landed(parameter)
        return None

    def _plan(self) -> dict[int, list[Move]]:
        """What is copied from each rank; first from the one on this worker's GPU."""
        source = self._trainer.layout
        wanted = layout_of(source.shapes, source.dtypes, [self._destination.landings])
        gpus = [part.handle.gpu for part in self._parts]
        devices = (gpus.index(self._gpu),) if self._gpu in gpus else None
        # In one bucket, because there are no messages whose size would have to be bounded.
        made = plan(source, [EngineLayout(layout=wanted, devices=devices)], bucket_bytes=2**62)
        moves: dict[int, list[Move]] = {}
        for move in sorted(made.moves(), key=lambda move: (not move.is_local, move.source, move.source_tensor)):
            moves.setdefault(move.source, []).append(move)
        return moves
