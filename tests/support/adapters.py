"""Trainers of one rank whose model has adapters."""

from __future__ import annotations

from pathlib import Path

from rounding import allowed_difference
from training import largest_relative_difference, shuffled, tiny_groups

from rlflow.config import Checkpointing, Config
from rlflow.workers.trainer.fsdp import FsdpTrainer


def one_rank(config: Config, folder: Path, is_critic: bool = False) -> FsdpTrainer:
    return FsdpTrainer(config, str(folder / "model"), 0, 1, "", is_critic)


def adapted(config: Config, folder: Path, seed: int | None = None) -> FsdpTrainer:
    """After two steps; `seed` shuffles the samples."""
    trainer = one_rank(config, folder)
    for _ in range(2):
        trainer.accumulate([tiny_groups() if seed is None else shuffled(tiny_groups(), seed)])
        assert trainer.step().applied
    return trainer


def checkpointed(config: Config, folder: Path, checkpointing: Checkpointing) -> tuple[float, float]:
    """The largest relative difference from what comes without checkpointing, and the one that rounding explains."""
    plain = dict(adapted(config, folder).full_parameters())
    others = [dict(adapted(config, folder, seed).full_parameters()) for seed in range(3)]
    config.trainer.gradient_checkpointing = checkpointing
    found = dict(adapted(config, folder).full_parameters())
    allowed = allowed_difference(largest_relative_difference(other, plain) for other in others)
    return largest_relative_difference(found, plain), allowed
