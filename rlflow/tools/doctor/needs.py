"""What a run needs of the machine that it is on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.registry import needs_critic
from rlflow.cluster.gpus import gpu_plan
from rlflow.config import Backend, Config, Placement, Transport
from rlflow.runtime.derived import object_store_bytes, sends_adapters, transport_of
from rlflow.tools.doctor.facts import ModelSize, Problem
from rlflow.workers.engine.setup import BYTES_PER_ELEMENT

CHECKPOINT_BYTES = 12
"""Of each trained parameter: itself and both moments, in float32."""
WITHOUT_OPTIMIZER_BYTES = 4
SMALLEST_WEIGHTS = 512 << 20
"""Of the smallest model that is worth training, in float32: room for less is a mistake."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Needs:
    """In bytes."""

    extras: tuple[str, ...]
    """Of rlflow that the settings ask for."""
    weights: int
    """In shared memory."""
    object_store: int
    """In shared memory; 0 where Ray runs already."""
    checkpoints: int
    """In run.dir; 0 where the model is not known."""
    memory: int
    """Of all processes, at most, on a machine without GPUs; 0 where that is not known."""
    sleeps: bool
    """Whether engines give their GPU's memory away in turn."""
    runs_programs: bool
    """Whether programs that the model writes are run."""


def needs_of(config: Config, size: ModelSize | Problem | None, *, is_run: bool) -> Needs:
    """Where the model's size is not known, and without a run: what any one needs."""
    model = size if isinstance(size, ModelSize) else None
    return Needs(
        extras=tuple(_extras(config)) if is_run else (),
        weights=_weights(config, model),
        object_store=object_store_bytes(config) if config.cluster.address is None else 0,
        checkpoints=_checkpoints(config, model) if model is not None else 0,
        memory=_memory(config, model) if model is not None else 0,
        sleeps=config.cluster.placement is Placement.colocated,
        runs_programs=is_run and _runs_programs(config),
    )


def _memory(config: Config, model: ModelSize) -> int:
    """In a cluster the processes are on several machines."""
    if config.cluster.address is not None:
        return 0
    return sum(count * model.memory.get(kind.value, 0) for kind, count in gpu_plan(config).counts.items())


def _weights(config: Config, model: ModelSize | None) -> int:
    if transport_of(config) is not Transport.shm or sends_adapters(config):
        return 0
    if model is None:
        return SMALLEST_WEIGHTS
    return model.num_parameters * BYTES_PER_ELEMENT[config.model.dtype]


def _checkpoints(config: Config, model: ModelSize) -> int:
    """Those that are kept, and the next one, which is complete before the oldest is removed."""
    each = CHECKPOINT_BYTES if config.trainer.save_optimizer else WITHOUT_OPTIMIZER_BYTES
    models = 1 + needs_critic(config.algorithm)
    return model.num_trained * each * models * (config.run.keep_checkpoints + 1)


def _extras(config: Config) -> list[str]:
    wanted = {
        "deepspeed": config.trainer.backend is Backend.deepspeed,
        "lora": config.lora.rank is not None,
        "wandb": config.trackers.wandb_project is not None,
        "mlflow": config.trackers.mlflow_experiment is not None,
    }
    return [extra for extra, is_wanted in wanted.items() if is_wanted]


def _runs_programs(config: Config) -> bool:
    functions = config.reward.function if isinstance(config.reward.function, list) else [config.reward.function]
    return config.env.name == "python_repair" or "code" in functions
