"""Which GPUs each actor asks Ray for, and whether there are enough."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.config import Config, Placement
from rlflow.errors import ConfigError


def check_gpus(config: Config, found: int) -> None:
    """Raise ConfigError when there are some GPUs, but not enough, or when engines and ranks cannot share them."""
    if not found:
        return
    per_engine, engines, ranks = config.rollout.tensor_parallel, config.rollout.engines, config.trainer.ranks
    reference = int(config.algorithm.kl_coefficient > 0)
    if config.cluster.placement is Placement.colocated:
        if per_engine != 1 or engines != ranks:
            raise ConfigError(
                "cluster.placement=colocated gives each GPU one engine and one rank of the trainer, so that it needs "
                f"rollout.tensor_parallel=1 and rollout.engines equal to trainer.ranks; got {per_engine}, {engines} "
                f"and {ranks}; change them, or take cluster.placement=separate"
            )
        engines = 0
    needed = engines * per_engine + ranks + reference
    if found < needed:
        raise ConfigError(
            f"the run needs {needed} GPUs (rollout.engines x rollout.tensor_parallel = {engines * per_engine} of their "
            f"own, trainer.ranks = {ranks}, reference = {reference}); the cluster has {found}; lower one of them"
        )


class Devices:
    """Ray's actor options of the processes that compute; without GPUs in the cluster, of none."""

    def __init__(self, config: Config) -> None:
        found = int(ray.cluster_resources().get("GPU", 0))
        check_gpus(config, found)
        self._has_gpus = found > 0
        self._per_engine = config.rollout.tensor_parallel
        self._shared = None
        if self._has_gpus and config.cluster.placement is Placement.colocated:
            self._shared = placement_group([{"GPU": 1}] * config.trainer.ranks)

    def engine(self, index: int) -> dict[str, Any]:
        return self._of_pair(index, self._shared) if self._shared is not None else self.whole(self._per_engine)

    def trainer(self, rank: int) -> dict[str, Any]:
        return self._of_pair(rank, self._shared) if self._shared is not None else self.whole(1)

    def whole(self, count: int) -> dict[str, Any]:
        return {"num_gpus": count if self._has_gpus else 0}

    def _of_pair(self, index: int, shared: PlacementGroup) -> dict[str, Any]:
        """Half of a GPU that nobody else gets: the other half is that of the engine, or rank, of the same number."""
        strategy = PlacementGroupSchedulingStrategy(shared, placement_group_bundle_index=index)
        return {"num_gpus": 0.5, "scheduling_strategy": strategy}
