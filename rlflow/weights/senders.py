"""The trainer's side of the transport that the settings name."""

from pathlib import Path

import torch

from rlflow.config import Config, Transport
from rlflow.runtime.derived import sends_adapters, transport_of
from rlflow.weights.disk.sender import DiskSender
from rlflow.weights.ipc.sender import SharedSender
from rlflow.weights.p2p.sender import PeerSender
from rlflow.weights.shm.sender import AdapterSender, SharedMemorySender
from rlflow.weights.source import WeightSender, WeightSource


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
