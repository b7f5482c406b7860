"""What the kernel lets this process have: the machine's memory, and the limits of its control groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60
"""Bytes; version 1 of control groups writes about 2^63 for no limit."""
_CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What the control groups of this process grant; None means no limit."""

    cpus: float | None
    memory: int | None
    memory_left: int | None


def read_memory(root: Path = Path("/")) -> tuple[int, int]:
    """The machine's memory in bytes, and how much of it can be taken without swapping."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemTotal"], sizes["MemAvailable"]


def read_limits(root: Path = Path("/")) -> Limits:
    """The tightest limits of the groups from this process's own up to the top, for both versions of control groups."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []  # limit and use
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        for folder in _folders(root / "sys/fs/cgroup", controllers, path):
            quota = [word for name in _CPU_FILES for word in _words(folder / name)]
            if len(quota) == 2 and quota[0] not in ("max", "-1"):
                cpus.append(int(quota[0]) / int(quota[1]))
            for limit_name, use_name in _MEMORY_FILES:
                limit, used = _words(folder / limit_name), _words(folder / use_name)
                if limit and used and limit[0] != "max" and int(limit[0]) < _UNLIMITED:
                    # File cache that was not used lately is left out, because the kernel would give it back.
                    words = _words(folder / "memory.stat")
                    stat = dict(zip(words[::2], words[1::2], strict=True))
                    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                    memory.append((int(limit[0]), max(0, int(used[0]) - reclaimable)))
    return Limits(
        cpus=min(cpus, default=None),
        memory=min((limit for limit, _ in memory), default=None),
        memory_left=min((max(0, limit - used) for limit, used in memory), default=None),
    )


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory of this machine, or what its control groups grant this process if that is less."""
    total, _ = read_memory(root)
    limit = read_limits(root).memory
    return total if limit is None else min(total, limit)


def _folders(top: Path, controllers: str, path: str) -> Iterator[Path]:
    """The folders of one line of /proc/self/cgroup. In a container the path may be the host's, which is not there."""
    if not controllers:
        mounts = [top, top / "unified"]
    else:
        mounts = [top / name for name in controllers.split(",") if name in ("cpu", "memory")]
    for mount in mounts:
        folder = mount / path.strip("/")
        while folder != mount:
            yield folder
            folder = folder.parent
        yield mount


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
