"""The actors that score: some that have processes call functions, or replicas of a reward model."""

from collections.abc import Awaitable, Sequence
from typing import Any

import ray

from rlflow.cluster.calls import ENDED
from rlflow.cluster.devices import Devices
from rlflow.cluster.pulse import watched
from rlflow.config import Config, ProcessKind
from rlflow.envs.base import OwnReward
from rlflow.errors import RewardLost, first_line
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.choose import ENVIRONMENT, choose_rewards, is_environment_alone
from rlflow.rewards.client import EnvironmentScorer, NoScorer, RewardClient, Scorer
from rlflow.rewards.pool import ScorerPool
from rlflow.runtime.derived import learns_from_rewards
from rlflow.types import Transcript, Verdict
from rlflow.workers.reward_model import RewardModelWorker


def start_rewards(
    config: Config,
    own: OwnReward,
    model_path: str | None,
    devices: Devices,
    threads: int,
    max_calls: int,
) -> dict[str, Any]:
    """Name -> actor; no actor if only what environments give in their steps counts.

    `own` is the environment's own function, `model_path` the folder of the reward model.
    """
    options: dict[str, Any] = {"max_concurrency": max_calls, "max_restarts": -1}
    if model_path is None:
        chosen = choose_rewards(config.reward, own)
        if is_environment_alone(chosen):
            return {}
        actor, count = watched(ScorerPool, config), devices.count(ProcessKind.reward)
        workers = -(-config.reward.workers // count)
        return {
            (name := f"reward {index}"): actor.options(
                name=name, **options, **devices.of(ProcessKind.reward, index)
            ).remote(name, chosen, workers, config.reward.timeout_s)
            for index in range(count)
        }
    actor = watched(RewardModelWorker, config)
    return {
        (name := f"reward model {index}"): actor.options(
            name=name, **options, **devices.of(ProcessKind.reward_model, index)
        ).remote(name, config, model_path, threads)
        for index in range(config.reward.model_replicas)
    }


def scorer_of(config: Config, names: Sequence[str], *, is_silent: bool = False) -> Scorer:
    """What an episode runner has score its episodes, given the names of the actors.

    `is_silent`: the environment is known to give no reward.
    """
    if names:
        return RewardClient([RayReward(name) for name in names], patience_s=config.deadlines.start_s)
    if is_silent and not learns_from_rewards(config):
        return NoScorer()
    (weight,) = config.reward.weights or (1.0,)
    reward = ChosenReward(name=ENVIRONMENT, function=None, weight=weight)
    return EnvironmentScorer(reward, is_needed=learns_from_rewards(config))


class RayReward:
    """Implements `rewards.client.RewardProcess` for an actor that Ray restarts under the same handle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = ray.get_actor(name)

    async def score(self, transcript: Transcript) -> Verdict:
        return await self._unless_dead(self._actor.score.remote(transcript))

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        return await self._unless_dead(self._actor.score_group.remote(transcripts))

    async def wait_until_ready(self) -> None:
        # Retried, because a process that Ray is restarting does not answer yet.
        await self._unless_dead(self._actor.__ray_ready__.options(max_task_retries=-1).remote())

    async def _unless_dead(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except ENDED as error:
            raise RewardLost(f"the {self._name} died: {first_line(error)}") from error
