"""Who listens where, read from the kernel."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_LISTENS = "0A"
_UDP_UNCONNECTED = "07"


def listeners(pid: int) -> dict[str, set[str]]:
    """The addresses that a process of this user and all that it started listen on, TCP and UDP, by process name."""
    sockets = _open_sockets()
    found: dict[str, set[str]] = {}
    for each in _tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = Path(f"/proc/{each}/comm").read_text().strip()
            for entry in Path(f"/proc/{each}/fd").iterdir():
                if address := sockets.get(_inode(entry)):
                    found.setdefault(name, set()).add(address)
    return found


def listening_addresses() -> set[str]:
    """ "kind address:port" of everything in this network namespace that strangers can reach, and abstract sockets."""
    found = set()
    for kind, fields in _rows():
        address, _, port = fields[1].partition(":")
        found.add(f"{kind} {_address(address)}:{int(port, 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[7:]
        if name and name[0].startswith("@"):
            found.add(f"unix {name[0]}")
    return found


def _inode(entry: Path) -> str:
    """Of the socket that this is, or some other text."""
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


def _open_sockets() -> dict[str, str]:
    """Inode -> local address of each socket of this machine that strangers can send to."""
    return {fields[9]: _address(fields[1].partition(":")[0]) for _, fields in _rows()}


def _rows() -> Iterator[tuple[str, list[str]]]:
    """(kind, fields) of each socket that takes what strangers send."""
    for name, state in (("tcp", _LISTENS), ("tcp6", _LISTENS), ("udp", _UDP_UNCONNECTED), ("udp6", _UDP_UNCONNECTED)):
        path = Path(f"/proc/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == state:
                yield name, fields


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
            found |= {Path(str(socket.laddr)) for socket in sockets if str(socket.laddr).startswith("/")}
    return found
