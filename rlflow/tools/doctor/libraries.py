"""The process that tries what a run would load, or Ray as a run would start or join it.

`python -m rlflow.tools.doctor.libraries SOCKET_FD LIFE_FD`; a library that crashes or hangs costs only what follows.
Messages are those of `answering`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlflow.processes.supervisor import supervise

if TYPE_CHECKING:
    from rlflow.config import Config
    from rlflow.tools.doctor.answering import Probe
    from rlflow.tools.doctor.facts import ModelReport, ModelSize, Problem, RayFacts, TorchFacts, VllmFacts


def main(socket_fd: int, life_fd: int) -> None:
    """Answer one question and end."""
    supervise(life_fd, [socket_fd])
    from rlflow.tools.doctor.answering import serve

    serve(socket_fd, _probes)


def _probes(config: Config, is_run: bool) -> Mapping[str, Probe]:
    from functools import partial

    return {
        "torch": _torch,
        "vllm": _vllm,
        "size": partial(_size, config),
        "model": partial(_model, config),
        "reward_model": partial(_reward_model, config),
        "engine": partial(_engine, config),
        "environment": partial(_environment, config),
        "ray": partial(_ray, config, is_run=is_run),
    }


def _torch() -> TorchFacts:
    import warnings

    import torch
    from torch.cuda import nccl

    from rlflow.tools.doctor.facts import TorchFacts

    gpus: list[tuple[str, int]] = []
    problem = ""
    if torch.version.cuda:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = _cuda_problem()
    if torch.version.cuda and not problem:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = [(device.name, device.total_memory) for device in devices]
    nccl = ".".join(map(str, nccl.version())) if torch.version.cuda else ""
    return TorchFacts(
        version=torch.__version__, cuda=torch.version.cuda or "", cuda_problem=problem, gpus=tuple(gpus), nccl=nccl
    )


def _cuda_problem() -> str:
    """Why some GPU cannot add two numbers; "" when all can, and where there is none."""
    import torch

    from rlflow.errors import first_line

    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return ""


def _vllm() -> VllmFacts:
    import torch
    import vllm
    from vllm.platforms import current_platform

    from rlflow.tools.doctor.facts import VllmFacts

    current_platform.import_kernels()
    names = torch._C._dispatch_get_all_op_names()
    return VllmFacts(
        version=vllm.__version__,
        platform=current_platform.device_type,
        num_kernels=sum(name.startswith("_C::") for name in names),
    )


def _size(config: Config) -> ModelSize | Problem:
    """From config.json, which is enough for it."""
    from rlflow.config import Backend, Offload
    from rlflow.models.resolve import POLICY, resolve_config
    from rlflow.tools.doctor.facts import ModelSize
    from rlflow.tools.dry_run.estimate import estimate
    from rlflow.tools.dry_run.model import read_model
    from rlflow.workers.trainer.policy import MAX_LOGITS

    folder = _here(lambda: resolve_config(config.model.path), POLICY)
    if not isinstance(folder, str):
        return folder
    facts = read_model(config, folder)
    memory, fullest = dict[str, int](), 0
    if config.trainer.backend is Backend.fsdp and config.trainer.offload is Offload.none and not config.reward.model:
        found = estimate(config, facts, MAX_LOGITS)
        memory = {name: each.total for name, each in found.processes.items()}
        fullest = max(each.num_bytes for each in found.gpus)
    trained = facts.adapters or facts.weights
    return ModelSize(
        num_parameters=facts.num_parameters,
        num_trained=sum(weight.size for weight in trained),
        memory=memory,
        fullest_gpu=fullest,
    )


def _model(config: Config) -> ModelReport | Problem:
    from transformers import AutoTokenizer

    from rlflow.models.resolve import POLICY, resolve_model
    from rlflow.rollout.render import Renderer
    from rlflow.tools.doctor.facts import ModelReport
    from rlflow.tools.env_tools.template_check import check_template

    folder = _here(lambda: resolve_model(config.model.path), POLICY)
    if not isinstance(folder, str):
        return folder
    trials = check_template(Renderer(AutoTokenizer.from_pretrained(folder)))
    return ModelReport(folder=folder, template=tuple((trial.name, trial.forks, trial.refused) for trial in trials))


def _reward_model(config: Config) -> Problem | None:
    from rlflow.models.resolve import REWARD, resolve_reward_model

    assert config.reward.model is not None
    path = config.reward.model
    found = _here(lambda: resolve_reward_model(path), REWARD)
    return None if isinstance(found, str) else found


def _here(resolve: Callable[[], str], setting: str) -> str | Problem:
    """A model's folder, or that it is none of this machine."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from rlflow.errors import ConfigError
    from rlflow.tools.doctor.facts import Problem

    try:
        return resolve()
    except ConfigError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            return Problem(text=f"{setting} is a model of the hub that is not on this machine", is_absent=True)
        raise


def _engine(config: Config) -> None:
    """Raises ConfigError for a model that vLLM would refuse."""
    import torch

    from rlflow.errors import ConfigError
    from rlflow.models.resolve import resolve_config
    from rlflow.workers.engine.setup import cache_shape, check_engine

    try:
        folder = resolve_config(config.model.path)
    except ConfigError:
        return  # said by `model`
    check_engine(config, cache_shape(folder), folder, on_gpu=torch.cuda.is_available())


def _environment(config: Config) -> None:
    """Raises ConfigError for an environment or a reward that cannot be loaded."""
    from rlflow.environments.find import load_environment

    load_environment(config.env, config.reward)


def _ray(config: Config, *, is_run: bool) -> RayFacts:
    import ray

    from rlflow.cluster.start import ray_cluster
    from rlflow.tools.doctor.nodes import read_cluster

    with ray_cluster(config):
        ray.get(ray.remote(_nothing).options(num_cpus=0).remote())
        return read_cluster(config, is_run=is_run)


def _nothing() -> None:
    """What a worker does to show that it can be started."""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
