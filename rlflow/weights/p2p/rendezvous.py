"""How the ranks of a trainer and the workers of an engine find each other: a store that rank 0 hosts, and groups.

Neither side's default process group is touched. Each engine has a group of its own with all ranks of the trainer, so
that one that dies breaks no other, and one that joins only builds its own. Everything listens on the address at which
the store is reached, which is loopback if all ranks are on one machine.
"""

import datetime
import ipaddress
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from rlflow.errors import ConfigError
from rlflow.roles import StagedWeights
from rlflow.runtime.environment import variables
from rlflow.weights.shape.landings import layout_from_json, layout_to_json
from rlflow.weights.source import WeightSource

_ENVIRONMENT = threading.Lock()
"""Held by the thread that changes the environment, because each engine is answered by a thread of its own."""
_LAYOUT = "layout"
"""Key of the store: where the ranks of the trainer keep the parameters."""


class Deadline:
    """A limit on the time that several waits take together."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=max(0.001, self._end_s - time.monotonic()))


def host_store(host: str, timeout_s: float) -> tuple[Store, int]:
    """A store that listens on a free port of `host`, and the port."""
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    timeout = datetime.timedelta(seconds=timeout_s)
    # Brings its own listener: the store's would listen on every interface.
    fd = listener.detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd), port


def connect(host: str, port: int, timeout_s: float) -> Store:
    """A new connection: while one thread waits on a connection, no other can use it.

    Raises RuntimeError when nobody answers.
    """
    return TCPStore(host, port, None, False, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


class HostedStore:
    """The store, as a rank of the trainer sees it. Rank 0 hosts it for as long as it keeps this."""

    def __init__(self, backend: WeightSource, rank: int, rendezvous: str, timeout_s: float) -> None:
        """Collective. `rendezvous` is where the ranks met; the store listens on the same address.

        Raises ConfigError when no layout tells what the ranks hold.
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
        """The engines'."""
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
        """Where to ask for a version: the answer of rank 0; None on the other ranks."""
        if self._rank > 0:
            return None
        address = f"tcp://{self.host}:{self._port}"
        return StagedWeights(version=version, path=address, num_bytes=self._num_bytes, slots=(), buckets=())


class TrainerStore:
    """The trainer's store and layout, as a worker of an engine sees them."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address` is tcp://host:port. Raises RuntimeError when nobody answers there."""
        found = urlsplit(address)
        assert found.hostname and found.port, f"the trainer's store is at tcp://host:port, not at {address}"
        self.host = found.hostname
        self.timeout_s = timeout_s
        self.store: Store = connect(found.hostname, found.port, timeout_s)
        self.layout = layout_from_json(self.store.get(_LAYOUT))


def build_group(
    store: Store, name: str, rank: int, size: int, device: torch.device, host: str, timeout_s: float
) -> ProcessGroup:
    """A group of all processes that call this with the same name: NCCL for tensors of a GPU, else gloo.

    `host` is where the store is. Raises RuntimeError when not all have come within the time.
    """
    own = PrefixStore(f"group/{name}", store)
    timeout = datetime.timedelta(seconds=timeout_s)
    address = own_address(host)
    # torch declares neither kind as a process group, though both are used as one.
    if device.type != "cuda":
        gloo: Any = torch.distributed.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(own, rank, size, options)
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
    options = nccl.Options()
    options._timeout = timeout
    # So that a wait ends at its deadline with an error; without this, torch ends the whole process.
    with _ENVIRONMENT, variables({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        group = nccl(own, rank, size, options)
    # All must be there when the connections are made, even a rank that has nothing to send in the first bucket.
    group.allreduce([torch.zeros(1, device=device)]).wait(timeout)
    return group


def own_address(host: str) -> str:
    """This machine's address on the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def begin(group: Any, transfer: Callable[..., Work], messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
    """Begin to send tensors [bytes] to ranks of the group, or to receive them: `transfer` is the group's send or recv.

    Each must stay as it is, or is filled, once it has been waited for. On GPUs this is one operation, in which no
    message waits for another; there is then one thing to wait for.
    """
    if not messages or messages[0][0].device.type == "cpu":
        return [transfer([packed], peer, 0) for packed, peer in messages]
    group._start_coalescing()  # made directly, a group takes no device
    for packed, peer in messages:
        transfer([packed], peer, 0)
    return [group._end_coalescing()]


def wait_all(works: Sequence[Work], deadline: Deadline) -> None:
    """Raises RuntimeError when a peer is lost, or not ready in time."""
    for work in works:
        work.wait(deadline.left)
