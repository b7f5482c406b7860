"""The actors that score: some that have processes call functions, and replicas of each reward model."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from rlflow.rewards.client import EnvironmentScorer, ModelScorer, NoScorer, RewardClient, Scorer
from rlflow.rewards.models import calls_functions, chosen_models, is_model_alone, weights_of
from rlflow.rewards.pool import ScorerPool
from rlflow.runtime.derived import learns_from_rewards
from rlflow.types import Transcript, Verdict
from rlflow.workers.reward_model import RewardModelWorker

SCORER = "scorer"
"""The first word in the name of each actor that has functions called."""


def start_rewards(
    config: Config,
    own: OwnReward,
    models: Mapping[str, str],
    devices: Devices,
    threads: int,
    max_calls: int,
) -> dict[str, Any]:
    """Name -> actor; no actor if only what environments give in their steps counts.

    `own` is the environment's own function, `models` the folder of each reward model by its name.
    """
    options: dict[str, Any] = {"max_concurrency": max_calls, "max_restarts": -1}
    found: dict[str, Any] = {}
    if calls_functions(config.reward) and not is_environment_alone(chosen := choose_rewards(config.reward, own)):
        actor, count = watched(ScorerPool, config), len(devices.places(ProcessKind.reward))
        for index in range(count):
            name, place = f"{SCORER} {index}", devices.of(ProcessKind.reward, index)
            workers = -(-config.reward.workers // count)
            scores = actor.options(name=name, **options, **place)
            found[name] = scores.remote(name, chosen, workers, config.reward.timeout_s)
    replicas = config.reward.model_replicas
    for number, model in enumerate(chosen_models(config.reward)):
        actor = watched(RewardModelWorker, config)
        for index, name in enumerate(_replicas(config, model.name)):
            place = devices.of(ProcessKind.reward_model, number * replicas + index)
            scores = actor.options(name=name, **options, **place)
            found[name] = scores.remote(name, config, models[model.name], threads, model.args)
    return found


def _replicas(config: Config, model: str) -> list[str]:
    """The names of the actors that hold a reward model."""
    which = "" if is_model_alone(config.reward) else f" {model}"
    return [f"reward model{which} {index}" for index in range(config.reward.model_replicas)]


def scorer_of(config: Config, names: Sequence[str], *, is_silent: bool = False) -> Scorer:
    """What an episode runner has score its episodes, given the names of the actors.

    `is_silent`: the environment is known to give no reward.
    """

    def client(of: Sequence[str]) -> RewardClient:
        return RewardClient([RayReward(name) for name in of], patience_s=config.deadlines.start_s)

    if is_model_alone(config.reward):
        return client(names)
    if config.reward.model is not None:
        scored = [
            (ChosenReward(name=one.name, function=None, weight=one.weight), client(_replicas(config, one.name)))
            for one in chosen_models(config.reward)
        ]
        return ModelScorer(scored, _functions(config, names, client) if calls_functions(config.reward) else None)
    if is_silent and not names and not learns_from_rewards(config):
        return NoScorer()
    return _functions(config, names, client)


def _functions(config: Config, names: Sequence[str], client: Callable[[Sequence[str]], Scorer]) -> Scorer:
    if own := [name for name in names if name.startswith(f"{SCORER} ")]:
        return client(own)
    weight = weights_of(config.reward)[0]
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
