"""The trainer's side of the transport that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from rlflow.config import Config, Transport
from rlflow.roles import StagedWeights
from rlflow.runtime.derived import sends_adapters, transport_of
from rlflow.weights.disk.sender import DiskSender
from rlflow.weights.ipc.sender import SharedSender
from rlflow.weights.p2p.sender import PeerSender
from rlflow.weights.shm.sender import AdapterSender, SharedMemorySender

if TYPE_CHECKING:
    from rlflow.weights.source import WeightSource


class WeightSender(Protocol):
    """Of one rank; every method but `close` is collective."""

    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's weights as a version; rank 0 is told where."""
        ...

    def release(self) -> None:
        """Give back what the staged version takes of the device: no engine reads it any more. Not collective."""
        ...

    def close(self) -> None: ...


def build_sender(config: Config, backend: WeightSource, rank: int, world_size: int, rendezvous: str) -> WeightSender:
    """`rendezvous` is where these ranks met; no other trainer has met there."""
    if sends_adapters(config):
        return AdapterSender(backend, rank, world_size)
    match transport_of(config):
        case Transport.p2p:
            return PeerSender(backend, rank, world_size, rendezvous, config.deadlines.weights_s)
        case Transport.ipc:
            device = torch.device("cuda", torch.cuda.current_device())
            return SharedSender(backend, rank, rendezvous, config.deadlines.weights_s, device)
        case Transport.disk:
            assert config.run.dir is not None, "a run knows its directory when workers start"
            return DiskSender(backend, rank, world_size, Path(config.run.dir) / "weights")
        case Transport.shm:
            return SharedMemorySender(backend, rank, world_size)
