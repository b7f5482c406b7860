"""The back end that the settings name. Each is imported only when it is chosen."""

import torch

from rlflow.config import Backend, Config, Offload
from rlflow.errors import ConfigError
from rlflow.workers.trainer.packed import TrainerBackend, TrainerRole


def build_backend(
    config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, role: TrainerRole = TrainerRole.policy
) -> TrainerBackend:
    """One rank of the trainer; returns when all ranks have met at `rendezvous` and hold the model.

    Raises ConfigError for settings without effect on this machine, a package that is missing, or a model that cannot be
    trained.
    """
    check_offload(config, torch.cuda.is_available())
    if config.trainer.backend is Backend.deepspeed:
        from rlflow.workers.trainer.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(config, model_path, rank, world_size, rendezvous, role)
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    return FsdpTrainer(config, model_path, rank, world_size, rendezvous, role)


def check_offload(config: Config, has_gpu: bool) -> None:
    if config.trainer.offload is Offload.cpu and not has_gpu:
        raise ConfigError(
            "trainer.offload=cpu has no effect on a machine without a GPU, where everything is in the memory of the "
            "CPU; set it to none"
        )
