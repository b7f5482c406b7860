"""How the ranks of a trainer find each other. Ports that are opened listen on the requested address only."""

import datetime
import ipaddress
import os
import socket
import tempfile
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from rlflow.runtime.gpus import has_gpu
from rlflow.weights.p2p.rendezvous import connect, host_of, host_store, own_address


def choose_device(rank: int) -> torch.device:
    """The process's own GPU, or one of the visible GPUs by rank; the CPU if there is none.

    Raises ConfigError for GPUs that torch cannot use.
    """
    if not has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def new_rendezvous(on_one_machine: bool) -> str:
    """Where ranks may meet: a file that only this user can reach, or an address of this machine, as Ray knows it."""
    if on_one_machine:
        return f"file://{tempfile.mkdtemp(prefix='rlflow-ranks-')}/store"
    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def join(rendezvous: str, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Form the process group: NCCL on CUDA, gloo on CPU.

    `rendezvous` is `tcp://host:port`, where rank 0 listens, or `file:///path` of a file that does not exist yet, for
    ranks of one machine. Raises ValueError for anything else.
    """
    place = urlsplit(rendezvous)
    if place.scheme not in ("file", "tcp") or not (place.path or place.port):
        raise ValueError(f"rendezvous must be tcp://host:port or file:///path; got {rendezvous}")
    store = host_store(rendezvous, timeout_s)[0] if rank == 0 else connect(rendezvous, timeout_s)
    # Without these the back ends listen on the address of the machine's name, which others may not reach.
    interface = _interface_of(own_address(host_of(rendezvous)))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _interface_of(address: str) -> str:
    """The network interface that has an address; all of 127.0.0.0/8 is on one."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    raise AssertionError(f"an address that the system gave, {address}, is on one of its interfaces")


def join_subgroup(groups: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup:
    """The process group of those ranks among `groups` that include this rank.

    `groups` cover all ranks once, and every rank calls this with the same `groups`.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=timeout)
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return own
