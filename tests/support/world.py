"""A world of its own for a run: processes, network, /tmp and /dev/shm that nothing else on this machine shares.

    unshare -> this file as process 1: mounts, loopback up -> the command; all processes end with process 1

What is there after a run and was not before is therefore the run's, and a full /dev/shm or a cut network harms nobody.
The world needs namespaces: root, or a kernel that lets users have namespaces of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from listening import listening_addresses

TEMPORARY, SHARED_MEMORY = Path("/tmp"), Path("/dev/shm")
SCRATCH = Path("/run")
"""The world's own too; nothing here counts as left behind. `ip netns` keeps its names in it."""
SHARED_MEMORY_MB = 2048
MARK = "RLFLOW_WORLD"
"""Set in the environment of what runs in a world."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    """What there is in the world, besides whoever looks."""

    files: frozenset[str]
    """In /tmp."""
    shared_memory: frozenset[str]
    """In /dev/shm, and segments of System V."""
    listeners: frozenset[str]
    """Addresses, and names of abstract sockets."""
    processes: frozenset[str]
    """ "pid command", without those that have ended and were not waited for."""


def observe() -> Observation:
    """Look at the world of this process. Its own files and processes are there too."""
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return Observation(
        files=frozenset(entry.name for entry in TEMPORARY.iterdir()),
        shared_memory=frozenset([entry.name for entry in SHARED_MEMORY.iterdir()] + segments),
        listeners=frozenset(listening_addresses()),
        processes=frozenset(_processes()),
    )


def left_behind(before: Observation, after: Observation) -> list[str]:
    """What is new, one line each."""
    return [
        f"{kind}: {each}"
        for kind, old, new in (
            ("file in /tmp", before.files, after.files),
            ("shared memory", before.shared_memory, after.shared_memory),
            ("listening socket", before.listeners, after.listeners),
            ("process", before.processes, after.processes),
        )
        for each in sorted(new - old)
    ]


def _processes() -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline()) or process.name()}"[:200])
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return found


@cache
def has_worlds() -> bool:
    """Whether worlds can be made here."""
    return subprocess.run(in_world(["true"], Path("/")), capture_output=True, timeout=60, check=False).returncode == 0


def in_world(command: list[str], kept: Path) -> list[str]:
    """The command that runs this one in a new world. The folder `kept` is there too, wherever it lies."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = ["--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    # The world ends with whoever made it, however that ends.
    return [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        *user,
        *namespaces,
        sys.executable,
        __file__,
        str(kept),
        *command,
    ]


def _mount(kind: str, target: Path, options: str = "mode=1777") -> None:
    subprocess.run(["mount", "-t", kind, "-o", options, "none", str(target)], check=True)


def _main(kept: Path, command: list[str]) -> int:
    """As process 1: prepare the world, run the command, and collect every process that lost its parent."""
    visible = [kept, Path(sys.prefix)]
    handles = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in visible]
    _mount("tmpfs", TEMPORARY)
    for folder, handle in zip(visible, handles, strict=True):
        if folder.is_relative_to(TEMPORARY):
            folder.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{handle}"
            subprocess.run(["mount", "--no-canonicalize", "--bind", source, str(folder)], check=True, pass_fds=handles)
    _mount("tmpfs", SHARED_MEMORY, f"mode=1777,size={SHARED_MEMORY_MB}m")
    _mount("tmpfs", SCRATCH, "mode=755")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    process = subprocess.Popen(command, env={**os.environ, MARK: "1"})  # kept: one that is dropped waits for its child
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
