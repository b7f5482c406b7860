"""Judges a machine: clock, processors, memory, disk, limits, loopback, environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.tools.doctor.facts import MachineFacts, Space, Tried, count_gpus
from rlflow.tools.doctor.findings import Finding, error, ok, warning
from rlflow.tools.doctor.needs import Needs
from rlflow.tools.dry_run.memory import size

MOVED_S = 1.0
"""How much a clock may be set while the doctor looks: time services slew by less."""
DAY_S = 86400.0
ENOUGH_OPEN_FILES = 4096
SMALL_MEMORY = 4 << 30
"""For the smallest model: each process that computes has libraries of half a gigabyte."""
RAY_FULL = 0.95
"""Share of a disk above which Ray writes no more objects to it."""
RAY_FREE = 1 << 30
"""For logs, and objects that do not fit into memory."""
SOCKET_PATH = 107
"""Longest path of a Unix socket."""
RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"


def check_machine(facts: MachineFacts, tried: Tried, needs: Needs, *, computes: bool) -> list[Finding]:
    """`computes`: whether engines or trainers may be here."""
    num_gpus = count_gpus(facts, tried)
    findings = [_clock(facts), _open_files(facts), *_loopback(facts)]
    if computes:
        findings += [_cpus(facts), _memory(facts, needs, num_gpus), _shared(facts.shared, needs)]
    return [*findings, _run_dir(facts.run_dir, needs), *_ray_dir(facts.ray_dir), *_environment(facts, needs, num_gpus)]


def _clock(facts: MachineFacts) -> Finding:
    if facts.clock < facts.written - DAY_S:
        behind = (facts.written - facts.clock) / DAY_S
        return error(
            "clock",
            f"it is {behind:.0f} days behind the time at which rlflow was installed",
            "set it, for certificates and tokens are refused (timedatectl set-ntp true; on Kubernetes, on the node)",
        )
    if abs(facts.clock_moved) > MOVED_S:
        return warning(
            "clock",
            f"it was set by {facts.clock_moved:+.1f} s while the doctor looked",
            "let one time service slew it (timedatectl status), else timings of a run are wrong",
        )
    return ok("clock", "plausible and steady")


def _cpus(facts: MachineFacts) -> Finding:
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cpus * 0.95:
        return warning(
            "processors",
            f"{facts.cpus} are visible, but the control group grants the time of {facts.cpu_quota:g}",
            f"set cluster.cpu_threads so that all processes have {max(1, int(facts.cpu_quota))} threads together, or "
            "raise the container's limit",
        )
    return ok("processors", f"{facts.cpus}")


def _memory(facts: MachineFacts, needs: Needs, num_gpus: int) -> Finding:
    free = facts.memory_available
    of = f"of {size(facts.memory_total)}"
    if facts.memory_limit is not None and facts.memory_left is not None and facts.memory_left < free:
        free, of = facts.memory_left, f"of the {size(facts.memory_limit)} that the control group grants"
    text = f"{size(free)} free {of}"
    if not num_gpus and needs.memory > free:
        return warning(
            "memory",
            f"{text}; the processes of the run may take up to {size(needs.memory)}",
            "lower trainer.micro_batch_tokens or rollout.kv_cache_gb, or take a larger machine; `--dry-run` lists them",
        )
    if free < SMALL_MEMORY:
        return warning(
            "memory",
            f"{text}, which is little for vLLM, a trainer and Ray",
            "free some, or raise the container's limit",
        )
    return ok("memory", text)


def _shared(shared: Space, needs: Needs) -> Finding:
    """Ray moves to a disk when its part does not fit; the weights do not."""
    if shared.problem:
        return error(
            "shared memory", f"{shared.path} cannot be written ({shared.problem})", f"mount a tmpfs on {shared.path}"
        )
    parts = {"weights": needs.weights, "Ray's object store": needs.object_store}
    wanted = sum(parts.values())
    named = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
    text = f"{size(shared.free)} free in {shared.path}"
    if shared.free >= wanted:
        return ok("shared memory", f"{text}; needed {size(wanted)} ({named})" if wanted else text)
    gigabytes = -(-(shared.total - shared.free + wanted) // 2**30) + 1
    cure = (
        f"docker run --shm-size={gigabytes}g; on Kubernetes an emptyDir with medium: Memory on {shared.path}; else "
        f"mount -o remount,size={gigabytes}G {shared.path}"
    )
    text += f", needed {size(wanted)} ({named})"
    if shared.free < needs.weights:
        return error("shared memory", text, cure)
    return warning("shared memory", f"{text}: Ray would keep its objects on a disk", cure)


def _run_dir(space: Space, needs: Needs) -> Finding:
    name = "run directory"
    if space.problem:
        return error(name, f"{space.path} cannot be written ({space.problem})", "choose another run.dir")
    text = f"{size(space.free)} free in {space.path}"
    if not needs.checkpoints:
        return ok(name, text)
    text += f"; checkpoints take {size(needs.checkpoints)}"
    if space.free >= needs.checkpoints:
        return ok(name, text)
    return error(name, text, "free some, choose another run.dir, or lower run.keep_checkpoints")


def _ray_dir(space: Space) -> Iterator[Finding]:
    name = "Ray's directory"
    cure = "set RAY_TMPDIR to a folder on a local disk that has room"
    if len(space.path) + len(RAY_SOCKET) > SOCKET_PATH:
        most = SOCKET_PATH - len(RAY_SOCKET) - len("/ray")
        yield error(
            name,
            f"{space.path} is too long a path for the sockets in it",
            f"set RAY_TMPDIR to a folder of at most {most} characters, such as /tmp",
        )
    elif space.problem:
        yield error(name, f"{space.path} cannot be written ({space.problem})", cure)
    elif space.free < RAY_FREE:
        yield error(
            name, f"{size(space.free)} free in {space.path}, for sockets, logs and what memory cannot hold", cure
        )
    elif space.free < (1 - RAY_FULL) * space.total:
        yield warning(
            name,
            f"the disk of {space.path} is more than {RAY_FULL:.0%} full, so that Ray writes no objects there when its "
            "memory is full",
            cure,
        )
    else:
        yield ok(name, f"{size(space.free)} free in {space.path}")


def _open_files(facts: MachineFacts) -> Finding:
    soft, hard = facts.open_files
    text = f"at most {soft}" if soft == hard else f"at most {soft}, which Ray raises to {hard} where it starts"
    if hard >= ENOUGH_OPEN_FILES:
        return ok("open files", text)
    return warning(
        "open files",
        f"{text}: too few for Ray with many workers",
        "ulimit -n 65536 (docker run --ulimit nofile=65536; LimitNOFILE= of a systemd unit)",
    )


def _loopback(facts: MachineFacts) -> Iterator[Finding]:
    if facts.loopback_problem:
        yield error("loopback", f"127.0.0.1 cannot be reached ({facts.loopback_problem})", "ip link set lo up")
    else:
        yield ok("loopback", "127.0.0.1 answers")
    if facts.hostname_problem:
        yield warning(
            "host name",
            f"{facts.hostname} does not resolve ({facts.hostname_problem}): each process waits for that as it starts",
            f"add the line `127.0.1.1 {facts.hostname}` to /etc/hosts",
        )
    else:
        yield ok("host name", f"{facts.hostname} resolves")


def _environment(facts: MachineFacts, needs: Needs, num_gpus: int) -> Iterator[Finding]:
    name = "environment"
    found = [*_hidden_gpus(facts), *_memory_of_cuda(facts, needs, num_gpus), *_threads(facts), *_proxies(facts)]
    mode = facts.environment.get("RAY_AUTH_MODE", "")
    if mode.lower() == "token" and not facts.has_token:
        found.append(
            error(
                name,
                "RAY_AUTH_MODE=token, but there is no token",
                "set RAY_AUTH_TOKEN_PATH, or: ray get-auth-token --generate",
            )
        )
    yield from found or [ok(name, "no variable that breaks a run")]


def _hidden_gpus(facts: MachineFacts) -> Iterator[Finding]:
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.gpu_devices and visible is not None and visible.strip() in ("", "-1"):
        yield warning(
            "environment",
            f"CUDA_VISIBLE_DEVICES={visible!r} hides all {facts.gpu_devices} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        )


def _memory_of_cuda(facts: MachineFacts, needs: Needs, num_gpus: int) -> Iterator[Finding]:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = facts.environment.get(variable, "")
        if num_gpus and needs.sleeps and "expandable_segments:true" in value.lower().replace(" ", ""):
            yield error(
                "environment",
                f"{variable}={value}, with which engines cannot sleep (cluster.placement=colocated)",
                f"unset {variable}",
            )


def _threads(facts: MachineFacts) -> Iterator[Finding]:
    for variable in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
        value = facts.environment.get(variable, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            yield warning(
                "environment",
                f"{variable}={value} binds the threads of every process to the same cores",
                f"unset {variable}",
            )


def _proxies(facts: MachineFacts) -> Iterator[Finding]:
    if facts.is_proxied:
        yield warning(
            "environment",
            "a proxy is set that gets requests to 127.0.0.1 too, so that programs cannot reach the model that plays",
            "export no_proxy=127.0.0.1,localhost",
        )
