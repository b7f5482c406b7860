"""Checks that load what a run would load: torch, vLLM, Ray, the model, the environment.

A library may crash or hang, so these run in a process of their own (`trials`). Each takes the function that does the
loading as an argument, for which tests put in a value or an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.cluster.fit_errors import check_counts
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.placement import describe as describe_places
from rlflow.cluster.placement import describe_way, fit
from rlflow.config import Config
from rlflow.errors import ConfigError, DeadlineError, SandboxError
from rlflow.models.resolve import resolve_config, resolve_model, resolve_reward_model
from rlflow.processes.sandbox.run import describe
from rlflow.rewards.models import model_paths
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import learns_from_rewards, teachers
from rlflow.runtime.gpus import GPU_BUILD, driver_problem
from rlflow.tools.doctor.findings import Finding, check_placement, error, of_config_error, ok, warning
from rlflow.tools.doctor.here import Here, ModelSize
from rlflow.tools.doctor.machine import SMALLEST_WEIGHTS, Needs, is_in_range
from rlflow.tools.dry_run.estimate import USABLE, estimate
from rlflow.tools.dry_run.memory import size

if TYPE_CHECKING:
    from rlflow.tools.env.template_check import Trial

SANDBOX_TIMEOUT_S = 180.0
_GIVE_GPUS = (
    "give the container the GPUs (docker run --gpus all; a limit nvidia.com/gpu), or install the CPU build: "
    "pip install rlflow[cpu] in a virtual environment of its own"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Torch:
    version: str
    cuda: str
    """The version of CUDA that it was built for; "" for a CPU build."""
    cuda_problem: str
    """Why CUDA does not work, if this is a CUDA build."""
    gpus: tuple[tuple[str, int], ...]
    """Name and bytes of each."""
    nccl: str
    """Version; "" without CUDA."""


def load_torch() -> Torch:
    """Import it, and have every GPU add two numbers."""
    import warnings

    import torch
    from torch.cuda import nccl

    from rlflow.errors import first_line

    if not torch.version.cuda:
        return Torch(version=torch.__version__, cuda="", cuda_problem="", gpus=(), nccl="")
    gpus: tuple[tuple[str, int], ...] = ()
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            for index in range(torch.cuda.device_count()):
                torch.ones(2, device=f"cuda:{index}").sum().item()
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = tuple((device.name, device.total_memory) for device in devices)
    except (RuntimeError, AssertionError) as failure:
        problem = first_line(failure)
    version = ".".join(map(str, nccl.version()))
    return Torch(version=torch.__version__, cuda=torch.version.cuda, cuda_problem=problem, gpus=gpus, nccl=version)


def check_torch(here: Here, needs: Needs, load: Callable[[], Torch] = load_torch) -> Iterator[Finding]:
    """torch itself, the GPUs that it sees, and NCCL."""
    torch = load()
    here.gpus = torch.gpus
    package = here.package("torch", here.hardware_extra)
    if package is not None and not is_in_range(torch.version, package.wanted):
        cure = f"pip install rlflow[{here.hardware_extra}]"
        yield error("torch", f"it is {torch.version}; rlflow needs {package.wanted}", cure)
    else:
        yield ok("torch", f"{torch.version}, {f'for CUDA {torch.cuda}' if torch.cuda else 'for the CPU'}")
    name = "GPUs"
    if torch.gpus:
        sizes = {f"{model}, {size(num_bytes)}" for model, num_bytes in torch.gpus}
        driver = f"; driver {here.driver}" if here.driver else ""
        yield ok(name, f"{len(torch.gpus)} ({'; '.join(sorted(sizes))}){driver}")
        yield ok("NCCL", torch.nccl)
    elif not here.gpu_devices and torch.cuda:
        reason = f" ({torch.cuda_problem})" if torch.cuda_problem else ""
        yield error(name, f"there are none{reason}, and this torch is built for CUDA {torch.cuda}", _GIVE_GPUS)
    elif not here.gpu_devices:
        yield ok(name, "none: runs on the CPU")
    elif not torch.cuda:
        yield error(name, f"{here.gpu_devices} are here, but this torch is built for the CPU", GPU_BUILD)
    elif problem := driver_problem(torch.cuda, here.driver):
        yield error(name, problem, "update the driver")
    elif torch.cuda_problem:
        cure = "look at nvidia-smi and dmesg; another program may hold the GPU"
        if "driver" in torch.cuda_problem.lower():
            cure = f"install a driver for CUDA {torch.cuda} or later (here is {here.driver or 'none'})"
        yield error(name, f"CUDA does not work: {torch.cuda_problem}", cure)
    else:
        cure = "unset CUDA_VISIBLE_DEVICES; in a container, give it the GPUs (docker run --gpus all)"
        yield warning(name, f"{here.gpu_devices} are here, and torch sees none of them", cure)


def load_vllm() -> tuple[str, str, int]:
    """Version, platform such as "cpu", and the number of operations that its compiled extension brings."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    num_kernels = sum(name.startswith("_C::") for name in torch._C._dispatch_get_all_op_names())
    return vllm.__version__, current_platform.device_type, num_kernels


def check_vllm(here: Here, needs: Needs, load: Callable[[], tuple[str, str, int]] = load_vllm) -> Iterator[Finding]:
    name, install = "vLLM", f"pip install rlflow[{here.hardware_extra}]"
    if here.vllm is None:
        yield error(name, "it is not installed", install)
        return
    if here.vllm == "vllm" and not here.num_gpus:
        yield error(name, "this build needs a GPU, and there is none", _GIVE_GPUS)
        return
    version, platform, num_kernels = load()
    package = here.package(here.vllm, here.hardware_extra)
    if package is not None and not is_in_range(version, package.wanted):
        yield error(name, f"{here.vllm} is {version}; rlflow needs {package.wanted}", install)
    elif not num_kernels:
        text = f"the compiled part of {here.vllm} {version} does not load: built for another torch or machine"
        yield error(name, text, f"{install}, in a fresh environment")
    else:
        yield ok(name, f"{here.vllm} {version}, for {platform}")


def load_size(config: Config) -> ModelSize:
    """From config.json alone. Raises ConfigError."""
    from rlflow.config import Backend, Offload
    from rlflow.tools.dry_run.model import read_model, read_teachers
    from rlflow.workers.trainer.token_logprobs import MAX_LOGITS

    facts = read_model(config, resolve_config(config.model.path))
    memory, fullest = dict[str, int](), 0
    if config.trainer.backend is Backend.fsdp and config.trainer.offload is Offload.none and not config.reward.model:
        found = estimate(config, facts, MAX_LOGITS, teachers=read_teachers(config))
        memory = {name: each.total for name, each in found.processes.items()}
        fullest = max(each.num_bytes for each in found.gpus)
    return ModelSize(
        num_parameters=facts.num_parameters,
        num_trained=sum(weight.size for weight in facts.adapters or facts.weights),
        is_packed=facts.is_packed,
        memory=memory,
        fullest_gpu=fullest,
    )


def check_size(here: Here, needs: Needs, load: Callable[[Config], ModelSize] = load_size) -> Iterator[Finding]:
    """Whether the run fits into the GPUs, as `--dry-run` estimates it at its most."""
    here.size = load(needs.config)
    most = here.size.fullest_gpu
    if not here.gpus or not most:
        return
    smallest = min(num_bytes for _, num_bytes in here.gpus)
    text = f"the run takes up to {size(most)} of a GPU; the smallest here has {size(smallest)}"
    if most <= USABLE * smallest:
        yield ok("GPU memory", text)
    else:
        yield warning("GPU memory", text, "`rlflow train ... --dry-run` says what takes it, and what to lower")


def load_model(config: Config) -> tuple[str, list[Trial]]:
    """Its folder, and how its chat template takes conversations. Raises ConfigError if anything is missing."""
    from rlflow.rollout.render import open_renderer
    from rlflow.tools.env.template_check import check_template
    from rlflow.workers.engine.tokens import check_tokens
    from rlflow.workers.trainer.heads import check_heads

    folder = resolve_model(config.model.path)
    check_tokens(config, folder)
    check_heads(config, folder)
    return folder, check_template(open_renderer(config, folder))


def check_model(
    here: Here, needs: Needs, load: Callable[[Config], tuple[str, list[Trial]]] = load_model
) -> Iterator[Finding]:
    name, path = "chat template", needs.config.model.path
    here.folder, trials = load(needs.config)
    known = ""
    if here.size is not None:
        way = "packed" if here.size.is_packed else "with a prompt for each sample"
        known = f"{here.size.num_parameters:,} parameters, trained {way}, "
    yield ok("model", f"{path}: {known}{here.folder}")
    forks = [trial.name for trial in trials if trial.forks]
    refused = {trial.name: trial.refused for trial in trials if trial.refused}
    if refused.get("plain"):
        yield of_config_error(name, refused["plain"])
    elif forks:
        text = f"it rewrites earlier replies ({', '.join(forks)}), so that each turn becomes a sample of its own"
        yield warning(
            name, text, "for environments of several turns, take a template that keeps them (chat_template.jinja)"
        )
    else:
        kept = ", ".join(trial.name for trial in trials if not trial.refused)
        not_taken = f"; it takes no conversations with {', '.join(refused)}" if refused else ""
        yield ok(name, f"keeps what was sampled: {kept}{not_taken}")


def check_reward_model(
    here: Here, needs: Needs, load: Callable[[str], str] = resolve_reward_model
) -> Iterator[Finding]:
    for path in model_paths(needs.config.reward).values():
        load(path)
        yield ok("reward model", path)


def check_teacher_models(here: Here, needs: Needs) -> Iterator[Finding]:
    """Raises ConfigError for a teacher that is missing, or has other tokens than the policy."""
    from rlflow.workers.teachers import check_teachers, with_folders

    config = with_folders(needs.config)
    check_teachers(config, resolve_model(config.model.path))
    for name, path in teachers(needs.config).items():
        yield ok(name, f"{path}, with the policy's vocabulary")


def absent_model(name: str, path: str, here: Here) -> Finding:
    """A model of the hub that is not on this machine."""
    space = here.hub_dir
    if here.environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        text = f"{path} is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it"
        return error(name, text, f"unset HF_HUB_OFFLINE, or bring it: hf download {path}")
    cure = "set HF_HOME to a folder on a file system with room"
    if space.problem:
        return error(name, f"{path} is to be downloaded, and {space.path} cannot be written ({space.problem})", cure)
    room = f"{size(space.free)} free in {space.path}"
    if space.free < SMALLEST_WEIGHTS:
        return error(name, f"{path} is to be downloaded: {room}", cure)
    return warning(name, f"{path} is not in the hub's cache: a run downloads it first; {room}", f"hf download {path}")


def check_engine(here: Here, needs: Needs) -> Iterator[Finding]:
    """Yields nothing. Raises ConfigError for a model that vLLM would refuse."""
    import torch

    from rlflow.workers.engine.setup import cache_shape
    from rlflow.workers.engine.setup import check_engine as check

    try:
        folder = resolve_config(needs.config.model.path)
    except ConfigError:
        return  # `check_model` says so
    check(needs.config, cache_shape(needs.config, folder), folder, on_gpu=torch.cuda.is_available())
    yield from ()


def check_tasks(here: Here, needs: Needs) -> Iterator[Finding]:
    """Raises ConfigError for an environment or a reward that cannot be loaded."""
    from rlflow.environments.find import load_environment

    load_environment(needs.config.env, needs.config.reward, needs_reward=learns_from_rewards(needs.config))
    yield ok("tasks", f"env.name={needs.config.env.name} and its reward load")


def check_ray(here: Here, needs: Needs) -> Iterator[Finding]:
    """Start Ray, or join it, as a run would. Raises whatever Ray raises, and ConfigError."""
    import ray

    from rlflow.cluster.start import ray_cluster

    with ray_cluster(needs.config):
        ray.get(ray.remote(_nothing).options(num_cpus=0).remote())
        yield from check_joined_ray(here, needs)


def _nothing() -> None:
    """What a worker does to show that it can be started, and that rlflow is there."""


def check_joined_ray(here: Here, needs: Needs) -> Iterator[Finding]:
    """The cluster that this process is part of, and whether the run fits on it."""
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    from rlflow.cluster.devices import machines_of_nodes, nodes_there

    config, nodes, resources = needs.config, nodes_there(), ray.cluster_resources()
    counts = {"node": len(nodes), "CPU": int(resources.get("CPU", 0)), "GPU": int(resources.get("GPU", 0))}
    is_joined = config.cluster.address is not None
    yield describe_ray(here, counts, is_joined=is_joined, has_tokens=is_token_auth_enabled())

    def place() -> Sequence[str]:
        """As `Devices` would place the run on machines that nobody else uses. Raises ConfigError."""
        machines = machines_of_nodes(nodes, is_joined=is_joined)
        num_gpus = sum(machine.gpus for machine in machines)
        check_gpus(config, num_gpus)
        check_counts(config.cluster.pools, machines)
        if not is_joined and not num_gpus:
            return ()
        placed = fit(config, machines)
        return [*describe_places(placed, machines), *describe_way(placed)]

    if needs.is_run:
        yield from check_placement(place)


def describe_ray(here: Here, counts: Mapping[str, int], *, is_joined: bool, has_tokens: bool) -> Finding:
    """`is_joined`: whether Ray was there already; `has_tokens`: whether it asks for one."""
    package = here.package("ray")
    version = (package and package.installed) or "a version that is not known"
    sizes = ", ".join(f"{count} {what}" if count == 1 else f"{count} {what}s" for what, count in counts.items())
    text = f"{version} answers; {sizes}"
    if is_joined and not has_tokens:
        cure = "ray get-auth-token --generate, bring the token to all nodes, and start Ray with RAY_AUTH_MODE=token"
        risk = "it asks for no token: anybody who reaches its ports can run programs there"
        return warning("Ray", f"{text}; {risk}", cure)
    return ok("Ray", f"{text}; asks for a token" if has_tokens else text)


async def check_sandbox(needs: Needs, look: Callable[[], Awaitable[str]] = describe) -> Finding:
    """Runs a program in it, which is in a process of its own anyway."""
    try:
        found = await within("the trial of the sandbox", SANDBOX_TIMEOUT_S, look())
    except (ConfigError, SandboxError, DeadlineError) as problem:
        text = f"programs of a model cannot be run: {problem}"
        cure = "install bubblewrap, or allow user namespaces or Landlock (Linux 6.2)"
        return (error if needs.runs_programs else warning)("sandbox", text, cure)
    return ok("sandbox", f"programs of a model run under {found.removeprefix('sandbox: ')}")
