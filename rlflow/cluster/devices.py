"""Which GPUs each actor asks Ray for."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.cluster.gpus import check_gpus, gpu_plan
from rlflow.config import Config, Process


class Devices:
    """Ray's actor options of the processes that compute; without GPUs in the cluster, of none."""

    def __init__(self, config: Config) -> None:
        found = int(ray.cluster_resources().get("GPU", 0))
        check_gpus(config, found)
        self._has_gpus = found > 0
        self._plan = gpu_plan(config)
        # One bundle a rank: nobody else gets what is left of its GPU.
        is_shared = self._has_gpus and len(self._plan.sharing) > 1
        self._bundles = placement_group([{"GPU": 1}] * config.trainer.ranks) if is_shared else None

    def of(self, kind: Process, index: int) -> dict[str, Any]:
        """The options of process `index` of a kind."""
        if self._bundles is not None and kind in self._plan.sharing:
            strategy = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index)
            return {"num_gpus": self._plan.share, "scheduling_strategy": strategy}
        count = self._plan.per_engine if kind is Process.engine else 1
        return {"num_gpus": count if self._has_gpus else 0}
