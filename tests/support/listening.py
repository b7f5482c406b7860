"""Who listens where, read from the kernel."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_LISTENS = "0A"
_UDP_UNCONNECTED = "07"


def listeners(pid: int) -> dict[str, set[str]]:
    """The addresses that a process of this user and all that it started listen on, TCP and UDP, by process name."""
    found: dict[str, set[str]] = {}
    for name, address, _ in _listening(pid, ("tcp", "tcp6", "udp", "udp6")):
        found.setdefault(name, set()).add(address)
    return found


def ports_of(pid: int) -> dict[int, str]:
    """The TCP ports that a process of this user and all that it started listen on, with the process's name."""
    return {port: name for name, _, port in _listening(pid, ("tcp", "tcp6"))}


def answers_as_a_store(port: int) -> bool:
    """Whether torch's store listens on this port of loopback: it answers a ping after its magic number."""
    validate, ping = 0, 13
    ask = struct.pack("<BI", validate, 0x3C85F7CE) + struct.pack("<BI", ping, 0x01020304)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
        connection.sendall(ask)
        return connection.recv(16) == struct.pack("<I", 0x01020304)
    return False


def _listening(pid: int, kinds: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Name of the process, address, port."""
    sockets = _open_sockets(kinds)
    for each in _tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = Path(f"/proc/{each}/comm").read_text().strip()
            for entry in Path(f"/proc/{each}/fd").iterdir():
                if found := sockets.get(_inode(entry)):
                    yield name, *found


def listening_addresses() -> set[str]:
    """ "kind address:port" of everything in this network namespace that strangers can reach, and abstract sockets."""
    kinds = ("tcp", "tcp6", "udp", "udp6")
    found = {f"{kind} {address}:{port}" for kind in kinds for address, port in _open_sockets([kind]).values()}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[7:]
        if name and name[0].startswith("@"):
            found.add(f"unix {name[0]}")
    return found


def _inode(entry: Path) -> str:
    """The socket's inode; some other text if the entry is no socket."""
    try:
        return os.readlink(entry).removeprefix("socket:[").removesuffix("]")
    except FileNotFoundError:  # just closed
        return ""


def is_loopback(address: str) -> bool:
    """Also of an IPv6 socket that takes IPv4 connections."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    tree = [pid]
    for each in tree:
        tree += children.get(each, [])
    return tree


def _open_sockets(kinds: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Inode -> local address and port of each socket of this machine that strangers can send to."""
    found = {}
    for name in kinds:
        state = _LISTENS if name.startswith("tcp") else _UDP_UNCONNECTED
        path = Path(f"/proc/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == state:
                address, _, port = fields[1].partition(":")
                found[fields[9]] = _address(address), int(port, 16)
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's own order of bytes."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def socket_files(pid: int) -> set[Path]:
    """Where the sockets of a process, and of all that it started, are in the file system."""
    found = set()
    for each in _tree(pid):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            sockets = psutil.Process(each).net_connections("unix")
            found |= {Path(str(each.laddr)) for each in sockets if str(each.laddr).startswith("/")}
    return found
