"""How the ranks of a trainer and the workers of an engine find each other: a store that rank 0 hosts, and groups.

Neither side's default process group is touched. Each engine has a group of its own with all ranks of the trainer, so
that one that dies breaks no other, and one that joins only builds its own. On one machine the store is a file, because
a store that listens lets everybody write to it; connections of groups listen on loopback. On several machines
everything listens on the address at which the store is reached.
"""

import datetime
import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
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

LOOPBACK = "127.0.0.1"
MAX_CHANNELS = 8
"""Channels of a group's NCCL: each engine has a group with every rank, whose kernels run beside those of training and
must all find room on the GPU; eight carry what a network card does."""
LOOK_AGAIN = datetime.timedelta(seconds=10)
_TELL_S = 10.0
_logger = logging.getLogger(__name__)
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


def is_file(address: str) -> bool:
    """Whether processes meet in a file, which needs no listener and is as private as its folder, and not at a host."""
    return urlsplit(address).scheme == "file"


def host_store(address: str, timeout_s: float) -> tuple[Store, int]:
    """A store at file:///path, or at tcp://host:port, and the port at which it listens, which is free if `port` is 0.

    A file has none: the 0 says so.
    """
    place, timeout = urlsplit(address), datetime.timedelta(seconds=timeout_s)
    if is_file(address):
        return _store_in(place.path, timeout), 0
    # Brings its own listener: the store's would listen on every interface.
    listener = socket.create_server((place.hostname, place.port or 0))
    host, port = listener.getsockname()
    fd = listener.detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd), port


def connect(address: str, timeout_s: float) -> Store:
    """A new connection to what `host_store` hosts: while one thread waits on a connection, no other can use it.

    Raises RuntimeError when nobody answers.
    """
    place, timeout = urlsplit(address), datetime.timedelta(seconds=timeout_s)
    if is_file(address):
        return _store_in(place.path, timeout)
    assert place.hostname and place.port, f"a store is at tcp://host:port or file:///path, not at {address}"
    return TCPStore(place.hostname, place.port, None, False, timeout, wait_for_workers=False)


def _store_in(path: str, timeout: datetime.timedelta) -> Store:
    store = FileStore(path, -1)  # of no fixed number of processes, so that none of them removes it
    store.set_timeout(timeout)
    return store


def host_of(address: str) -> str:
    """The host at which the processes of a store find each other; loopback if a file makes them share a machine."""
    return urlsplit(address).hostname or LOOPBACK


class HostedStore:
    """The store, as a rank of the trainer sees it. Rank 0 hosts it for as long as it keeps this."""

    def __init__(self, backend: WeightSource, rank: int, rendezvous: str, timeout_s: float) -> None:
        """Collective. `rendezvous` is where the ranks met; the store is on the same host, or beside that file.

        Raises ConfigError when no layout tells what the ranks hold.
        """
        source = backend.layout()
        if source is None:
            raise ConfigError("adapters are merged into whole parameters first; set weights.transport=shm")
        self.source = source
        self._rank = rank
        self.timeout_s = timeout_s
        specs = backend.parameter_specs()
        self.dtypes = {name: dtype for name, dtype, _ in specs}
        """The engines'."""
        self._num_bytes = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in specs)
        own, port = f"{rendezvous}.weights" if is_file(rendezvous) else f"tcp://{host_of(rendezvous)}:0", 0
        if rank == 0:
            self._hosted, port = host_store(own, timeout_s)
            self._hosted.set(_LAYOUT, layout_to_json(source))
        found = backend.add_up([float(port), float(rank == 0)])
        self.address = own if is_file(own) else f"tcp://{host_of(own)}:{round(found[0] / found[1])}"
        """Where the store is, for ranks and workers."""

    def connect(self, timeout_s: float | None = None) -> Store:
        """A connection for one thread."""
        return connect(self.address, timeout_s or self.timeout_s)

    def staged(self, version: int) -> StagedWeights | None:
        """Where to ask for a version: the answer of rank 0; None on the other ranks."""
        if self._rank > 0:
            return None
        return StagedWeights(version=version, path=self.address, num_bytes=self._num_bytes, slots=(), buckets=())


class TrainerStore:
    """The trainer's store and layout, as a worker of an engine sees them."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address` is where `HostedStore` is. Raises RuntimeError when nobody answers there."""
        self.address = address
        self.timeout_s = timeout_s
        self.store: Store = self.connect()
        self.layout = layout_from_json(self.store.get(_LAYOUT))

    def connect(self, timeout_s: float | None = None) -> Store:
        """A connection for one thread."""
        return connect(self.address, timeout_s or self.timeout_s)


class PeerGroup:
    """All ranks of a trainer and the workers of one engine: NCCL for tensors of a GPU, else gloo. Any of them ends it.

    A process that waits for a peer on a GPU does not notice that the peer has given up: NCCL tells nobody, and its
    kernel would spin until the deadline. So a process that gives up says it in the store, where a thread of each waits.
    """

    def __init__(self, home: HostedStore | TrainerStore, name: str, rank: int, size: int, device: torch.device) -> None:
        """All processes that give the same name. Raises RuntimeError when not all have come within the time."""
        self._home = home
        self._broken = f"broken/{name}"
        self._lock = threading.Lock()
        own = PrefixStore(f"group/{name}", home.connect())
        _await_all(own, rank, size, home.timeout_s)
        self._group: Any = build_group(own, rank, size, device, home)
        self._watching = threading.Thread(target=self._watch, name=f"group {name}", daemon=True)
        self._watching.start()
        if device.type == "cuda":
            # All must be there when the connections are made, even a rank that has nothing to send in the first bucket.
            self._group.allreduce([torch.zeros(1, device=device)]).wait()

    @property
    def is_broken(self) -> bool:
        """Whether a process of the group has given it up."""
        return self._group is None

    def send(self, messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
        """Begin to send tensors [bytes] to ranks; each must stay as it is until it has been waited for."""
        group = self._unbroken()
        return _begin(group, group.send, messages)

    def receive(self, messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
        """Begin to fill tensors [bytes] with what ranks send."""
        group = self._unbroken()
        return _begin(group, group.recv, messages)

    def give_up(self) -> None:
        """End what is under way, in all processes of the group."""
        if self._abort():
            with suppress(RuntimeError):  # without a store there is no trainer, so that nobody waits for it
                self._home.connect(_TELL_S).set(self._broken, "")
            self._watching.join(_TELL_S)  # so that it is not met by the end of the interpreter

    def _unbroken(self) -> Any:
        if self._group is None:
            raise RuntimeError("a peer has given up the group of ranks and workers")
        return self._group

    def _abort(self) -> bool:
        """Whether this is the first time."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()  # gloo knows no such thing: its connections close when nothing refers to the group
        return group is not None

    def _watch(self) -> None:
        try:
            store = self._home.connect()
            while not comes(store, self._broken):
                pass  # for as long as the trainer keeps the store
        except RuntimeError as error:
            _logger.info("a group of ranks and workers ends, because the trainer's store does: %s", error)
        self._abort()


def comes(store: Store, key: str) -> bool:
    """Wait a while for a key: whether it is there. Raises RuntimeError when the store is lost."""
    try:
        store.wait([key], LOOK_AGAIN)
    except RuntimeError as error:  # a store that listens raises a subclass of its own
        if "timeout" not in str(error).lower():
            raise
        return False
    return True


def _await_all(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """So that nobody waits in NCCL, which knows no deadline there, for one that does not come."""
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(size)], datetime.timedelta(seconds=timeout_s))


def build_group(
    store: Store, rank: int, size: int, device: torch.device, home: HostedStore | TrainerStore
) -> ProcessGroup:
    """What torch calls a process group, which nothing of torch's own knows."""
    timeout = datetime.timedelta(seconds=home.timeout_s)
    address = own_address(host_of(home.address))
    # torch declares neither kind as a process group, though both are used as one.
    if device.type != "cuda":
        gloo: Any = torch.distributed.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, size, options)
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
    options = nccl.Options()
    options._timeout = timeout
    options.config.max_ctas = MAX_CHANNELS
    # A transfer is queued on the GPU and waited for once. What fails or overruns is aborted by torch's own thread,
    # which must not end the process; what has come then is not what a header says.
    with _ENVIRONMENT, variables({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "0"}):
        return nccl(store, rank, size, options)


def own_address(host: str) -> str:
    """This machine's address on the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _begin(group: Any, transfer: Callable[..., Work], messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
    """On GPUs this is one operation, in which no message waits for another; there is then one thing to wait for."""
    if not messages or messages[0][0].device.type == "cpu":
        return [transfer([packed], peer, 0) for packed, peer in messages]
    group._start_coalescing()  # made directly, a group takes no device
    for packed, peer in messages:
        transfer([packed], peer, 0)
    return [group._end_coalescing()]


def wait_all(works: Sequence[Work], deadline: Deadline) -> None:
    """On a GPU only what is queued from now on waits. Raises RuntimeError when a peer is lost, or not ready in time."""
    for work in works:
        work.wait(deadline.left)
