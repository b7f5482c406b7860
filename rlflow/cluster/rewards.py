"""The actors that score: processes that call a function, or replicas of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from rlflow.cluster.devices import Devices
from rlflow.config import Config, Process
from rlflow.envs.base import RewardFunction
from rlflow.errors import RewardLost, first_line
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.choose import ENVIRONMENT, choose_rewards, is_environment_alone
from rlflow.rewards.client import EnvironmentScorer, RewardClient, Scorer
from rlflow.rewards.pool import ScorerPool
from rlflow.types import Transcript, Verdict
from rlflow.workers.reward_model import RewardModelWorker


def start_rewards(
    config: Config,
    own: RewardFunction | None,
    model_path: str | None,
    devices: Devices,
    threads: int,
    max_calls: int,
) -> dict[str, Any]:
    """Name -> actor; none where only what environments give in their steps counts.

    `own` is the environment's own function, `model_path` the folder of the reward model.
    """
    options: dict[str, Any] = {"max_concurrency": max_calls, "max_restarts": -1}
    if model_path is None:
        chosen = choose_rewards(config.reward, own)
        if is_environment_alone(chosen):
            return {}
        worker = ray.remote(ScorerPool).options(name="reward", **options, **devices.of(Process.reward, 0))
        return {"reward": worker.remote(chosen, config.reward.workers, config.reward.timeout_s)}
    return {
        f"reward model {index}": ray.remote(RewardModelWorker)
        .options(name=f"reward model {index}", **options, **devices.of(Process.reward_model, index))
        .remote(config, model_path, threads)
        for index in range(config.reward.model_replicas)
    }


def scorer_of(config: Config, names: Sequence[str]) -> Scorer:
    """Whom an episode runner asks, given the names of the actors that score."""
    if names:
        return RewardClient([RayReward(name) for name in names], patience_s=config.deadlines.start_s)
    (weight,) = config.reward.weights or (1.0,)
    return EnvironmentScorer(ChosenReward(name=ENVIRONMENT, function=None, weight=weight))


class RayReward:
    """Implements `reward_client.RewardProcess` for an actor that Ray restarts under the same handle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = ray.get_actor(name)

    async def score(self, transcript: Transcript) -> Verdict:
        try:
            return await self._actor.score.remote(transcript)
        except RayActorError as error:
            raise self._lost(error) from error

    async def ready(self) -> None:
        try:
            # Retried, for a process that Ray is restarting does not answer yet.
            await self._actor.__ray_ready__.options(max_task_retries=-1).remote()
        except RayActorError as error:
            raise self._lost(error) from error

    def _lost(self, error: RayActorError) -> RewardLost:
        return RewardLost(f"the {self._name} died: {first_line(error)}")
