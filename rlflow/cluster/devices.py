"""Which GPUs each actor asks Ray for."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.cluster.gpus import check_gpus
from rlflow.config import Config, Placement


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
