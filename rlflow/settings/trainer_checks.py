"""Cross-checks of the trainer's settings."""

from rlflow.algorithms.schedules import check_schedule
from rlflow.config import Backend, Checkpointing, Config, Dtype, Offload, Optimizer
from rlflow.errors import ConfigError


def check_trainer(config: Config) -> None:
    """Raise ConfigError for what a back end or an optimiser cannot do."""
    trainer = config.trainer
    check_schedule(trainer, config.run.steps)
    if trainer.backend is Backend.deepspeed and trainer.zero_stage not in (1, 2, 3):
        found = "null" if trainer.zero_stage is None else trainer.zero_stage
        raise ConfigError(f"trainer.zero_stage must be 1, 2 or 3 with trainer.backend=deepspeed; got {found}")
    if trainer.tensor_parallel > 1 and trainer.sequence_parallel > 1:
        raise ConfigError(
            f"trainer.sequence_parallel={trainer.sequence_parallel} does not go with trainer.tensor_parallel="
            f"{trainer.tensor_parallel}, because both share out the heads; set one of them to 1"
        )
    groups = {"tensor_parallel": trainer.tensor_parallel, "sequence_parallel": trainer.sequence_parallel}
    for key, size in groups.items():
        if trainer.ranks % size:
            raise ConfigError(f"trainer.{key} must divide trainer.ranks ({trainer.ranks}); got {size}")
        if trainer.ranks % (trainer.replicas * size):
            raise ConfigError(
                f"trainer.replicas times trainer.{key} must divide trainer.ranks ({trainer.ranks}); got "
                f"{trainer.replicas} x {size}"
            )
    if trainer.optimizer is not Optimizer.adamw and trainer.backend is Backend.deepspeed:
        raise ConfigError(
            f"trainer.optimizer={trainer.optimizer} does not go with trainer.backend=deepspeed, whose flat buffers "
            "hold neither whole matrices nor moments of a byte; set trainer.optimizer=adamw, or trainer.backend=fsdp"
        )
    if trainer.gradient_checkpointing is Checkpointing.selective and trainer.backend is Backend.deepspeed:
        raise ConfigError(
            "trainer.gradient_checkpointing=selective does not go with trainer.backend=deepspeed, which gathers "
            "parameters within a layer; set it to full, or trainer.backend=fsdp"
        )
    if trainer.optimizer is Optimizer.muon and trainer.tensor_parallel > 1:
        raise ConfigError(
            f"trainer.optimizer=muon does not go with trainer.tensor_parallel={trainer.tensor_parallel}, which cuts "
            "the matrices that Muon needs whole; set one of them back"
        )
    if trainer.zero_stage == 1 and config.model.dtype is Dtype.bfloat16:
        raise ConfigError(
            "trainer.zero_stage=1 with model.dtype=bfloat16 would add gradients up in bfloat16, and to add them up in "
            "float32 DeepSpeed takes another class of optimiser there, BF16_Optimizer, which rlflow cannot save; set "
            "trainer.zero_stage to 2, which adds them up in float32 and takes less memory"
        )
    if trainer.nvme_path is not None and trainer.offload is Offload.cpu:
        raise ConfigError(
            f"trainer.offload=cpu contradicts trainer.nvme_path={trainer.nvme_path}, where everything goes; set one of "
            "them only"
        )
