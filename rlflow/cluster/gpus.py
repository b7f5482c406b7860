"""How many GPUs a run asks for. Imports no Ray, so that a dry run can ask too."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.chosen import needs_critic
from rlflow.config import Config, Placement, needs_reference
from rlflow.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuNeeds:
    """GPUs of each role."""

    engines: int
    """0 where the engines are on the trainer's GPUs."""
    trainer: int
    critic: int
    reference: int

    @property
    def total(self) -> int:
        return self.engines + self.trainer + self.critic + self.reference


def gpu_needs(config: Config) -> GpuNeeds:
    is_colocated = config.cluster.placement is Placement.colocated
    return GpuNeeds(
        engines=0 if is_colocated else config.rollout.engines * config.rollout.tensor_parallel,
        trainer=config.trainer.ranks,
        critic=config.trainer.ranks if needs_critic(config.algorithm) else 0,
        reference=int(needs_reference(config)),
    )


def check_gpus(config: Config, found: int) -> None:
    """Raise ConfigError when there are some GPUs, but not enough, or when engines and ranks cannot share them."""
    if not found:
        return
    per_engine, engines, ranks = config.rollout.tensor_parallel, config.rollout.engines, config.trainer.ranks
    if config.cluster.placement is Placement.colocated and (per_engine != 1 or engines != ranks):
        raise ConfigError(
            "cluster.placement=colocated gives each GPU one engine and one rank of the trainer, so that it needs "
            f"rollout.tensor_parallel=1 and rollout.engines equal to trainer.ranks; got {per_engine}, {engines} "
            f"and {ranks}; change them, or take cluster.placement=separate"
        )
    needs = gpu_needs(config)
    if found < needs.total:
        raise ConfigError(
            f"the run needs {needs.total} GPUs (rollout.engines x rollout.tensor_parallel = {needs.engines} of their "
            f"own, trainer.ranks = {needs.trainer}, critic = {needs.critic}, reference = {needs.reference}); "
            f"the cluster has {found}; lower one of them"
        )
