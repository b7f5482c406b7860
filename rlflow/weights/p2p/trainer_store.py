"""The store of the trainer in which engines find what they need to be given weights, as both sides see it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import ConfigError
from rlflow.roles import StagedWeights
from rlflow.weights.learn.wire import layout_from_json, layout_to_json
from rlflow.weights.p2p.meeting import connect, host_store
from rlflow.weights.shape.layout import Layout

if TYPE_CHECKING:
    from rlflow.weights.source import WeightSource

_LAYOUT = "layout"


class HostedStore:
    """In a rank of the trainer. Rank 0 hosts the store for as long as it keeps this."""

    def __init__(self, backend: WeightSource, rank: int, rendezvous: str, timeout_s: float) -> None:
        """Collective. `rendezvous` is where the ranks met; the store listens on the same address.

        Raises ConfigError where no layout tells what the ranks hold.
        """
        source = backend.layout()
        if source is None:
            raise ConfigError("adapters are merged into whole parameters first; set weights.transport=shm")
        self.source = source
        self.host = urlsplit(rendezvous).hostname or "127.0.0.1"
        self._rank = rank
        self._timeout_s = timeout_s
        specs = backend.parameter_specs()
        self.dtype = specs[0][1]
        """That of the engines."""
        self._num_bytes = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in specs)
        port = 0
        if rank == 0:
            self._hosted, port = host_store(self.host, timeout_s)
            self._hosted.set(_LAYOUT, layout_to_json(source))
        found = backend.add_up([float(port), float(rank == 0)])
        self._port = round(found[0] / found[1])

    def connect(self, timeout_s: float | None = None) -> Store:
        """A connection for one thread."""
        return connect(self.host, self._port, timeout_s or self._timeout_s)

    def staged(self, version: int) -> StagedWeights | None:
        """What rank 0 says of a version: where to ask for it."""
        if self._rank > 0:
            return None
        address = f"tcp://{self.host}:{self._port}"
        return StagedWeights(version=version, path=address, num_bytes=self._num_bytes, slots=(), buckets=())


class TrainerStore:
    """In a worker of an engine."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address` is tcp://host:port. Raises RuntimeError when nobody answers there."""
        found = urlsplit(address)
        assert found.hostname and found.port, f"the trainer's store is at tcp://host:port, not at {address}"
        self.host = found.hostname
        self.timeout_s = timeout_s
        self.store: Store = connect(found.hostname, found.port, timeout_s)

    def layout(self) -> Layout:
        """Where the ranks of the trainer keep the parameters."""
        return layout_from_json(self.store.get(_LAYOUT))
