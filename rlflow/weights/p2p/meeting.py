"""How the ranks of a trainer and the workers of an engine find each other: a store that rank 0 hosts, and groups.

Neither side's default process group is touched. Each engine has a group of its own with all ranks of the trainer, so
that one that dies breaks no other, and one that joins only builds its own. All that is opened listens on the address
at which the store is reached, which is loopback where all ranks are on one machine.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from rlflow.runtime.environment import variables


class Deadline:
    """For several waits that together may take so long."""

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
    """A connection of one's own: while one thread waits on a connection, no other can use it.

    Raises RuntimeError when nobody answers.
    """
    return TCPStore(host, port, None, False, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


def build_group(
    store: Store, name: str, rank: int, size: int, device: torch.device, host: str, timeout_s: float
) -> ProcessGroup:
    """A group of those who call this with the same name: NCCL for tensors of a GPU, else gloo.

    `host` is where the store is. Raises RuntimeError when not all have come within the time.
    """
    own = PrefixStore(f"group/{name}", store)
    timeout = datetime.timedelta(seconds=timeout_s)
    address = own_address(host)
    if device.type == "cuda":
        return _nccl_group(own, rank, size, device, ipaddress.ip_address(address).is_loopback, timeout)
    # torch declares neither as a process group, though both are used as one.
    gloo: Any = torch.distributed.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(own, rank, size, options)


def _nccl_group(
    store: Store, rank: int, size: int, device: torch.device, is_local: bool, timeout: datetime.timedelta
) -> ProcessGroup:
    if is_local:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
    options = nccl.Options()
    options._timeout = timeout
    with _waits_block():
        group = nccl(store, rank, size, options)
    # All must be there when the connections are made, also who has nothing to send in the first bucket.
    group.allreduce([torch.zeros(1, device=device)]).wait(timeout)
    return group


_ENVIRONMENT = threading.Lock()
"""Held by the thread that has changed it: each engine is answered by one of its own."""


@contextmanager
def _waits_block() -> Iterator[None]:
    """So that a wait of a group made here ends at its deadline with an error; else torch ends the whole process."""
    with _ENVIRONMENT, variables({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        yield


def own_address(host: str) -> str:
    """This machine's address on the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def send(group: ProcessGroup, messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
    """Begin to send tensors [bytes] to ranks of the group; each must stay as it is until it has been waited for."""
    with _together(group, messages) as works:
        works += [group.send([packed], peer, 0) for packed, peer in messages]
    return works


def receive(group: ProcessGroup, messages: Sequence[tuple[Tensor, int]]) -> list[Work]:
    """Begin to receive tensors [bytes] from ranks of the group; they are filled when they have been waited for."""
    with _together(group, messages) as works:
        works += [group.recv([packed], peer, 0) for packed, peer in messages]
    return works


@contextmanager
def _together(group: ProcessGroup, messages: Sequence[tuple[Tensor, int]]) -> Iterator[list[Work]]:
    """On GPUs as one operation, in which no message waits for another; there is then one thing to wait for."""
    works: list[Work] = []
    device = messages[0][0].device if messages else torch.device("cpu")
    if device.type == "cpu":
        yield works
        return
    made: Any = group  # made directly, it takes no device
    made._start_coalescing()
    yield works
    works[:] = [made._end_coalescing()]


def wait_all(works: Sequence[Work], deadline: Deadline) -> None:
    """Raises RuntimeError when a peer is lost, or not ready in time."""
    for work in works:
        work.wait(deadline.left)
