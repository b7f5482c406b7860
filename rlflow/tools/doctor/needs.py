"""What a run needs of the machine that it is on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.registry import needs_critic
from rlflow.cluster.gpus import gpu_plan
from rlflow.config import Backend, Config, Placement, Transport
from rlflow.runtime.derived import object_store_bytes, sends_adapters, transport_of
from rlflow.tools.doctor.here import ModelSize
from rlflow.workers.engine.setup import BYTES_PER_ELEMENT

CHECKPOINT_BYTES = 12
"""A trained parameter and both of its moments, in float32."""
WITHOUT_OPTIMIZER_BYTES = 4
SMALLEST_WEIGHTS = 512 << 20
"""The smallest model that is worth training, in float32: room for less is a mistake."""


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


def needs_of(config: Config, size: ModelSize | None, *, is_run: bool) -> Needs:
    """What this run needs; if the model's size is not known, or no run was named, what any run needs."""
    weights = checkpoints = memory = 0
    if transport_of(config) is Transport.shm and not sends_adapters(config):
        weights = SMALLEST_WEIGHTS if size is None else size.num_parameters * BYTES_PER_ELEMENT[config.model.dtype]
    if size is not None:
        # Those that are kept, and the next one, which is complete before the oldest is removed.
        num_checkpoints = (1 + needs_critic(config.algorithm)) * (config.run.keep_checkpoints + 1)
        each = CHECKPOINT_BYTES if config.trainer.save_optimizer else WITHOUT_OPTIMIZER_BYTES
        checkpoints = size.num_trained * each * num_checkpoints
    if size is not None and config.cluster.address is None:  # in a cluster the processes are on several machines
        memory = sum(count * size.memory.get(kind.value, 0) for kind, count in gpu_plan(config).counts.items())
    extras = {
        "deepspeed": config.trainer.backend is Backend.deepspeed,
        "lora": config.lora.rank is not None,
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
