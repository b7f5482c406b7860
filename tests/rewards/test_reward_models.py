"""Several reward models, and reward models beside functions: what is chosen, weighed, added, and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transcripts import said

from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.slots import num_waiting, slots_of
from rlflow.config import Config, ModelPlacement, ProcessKind, RewardConfig
from rlflow.errors import ConfigError
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.choose import choose_rewards
from rlflow.rewards.client import ModelScorer, Scorer
from rlflow.rewards.models import chosen_models
from rlflow.settings.checks import check
from rlflow.types import EpisodeEnd, Transcript, Verdict

TWO = {"helpful": "a", "harmless": "b"}


def both(**settings: Any) -> RewardConfig:
    return RewardConfig(**{"function": ["exact_match", "f1"], "model": TWO, **settings})


def test_functions_come_before_models_in_the_weights() -> None:
    reward = both(weights=[1.0, 2.0, 3.0, 4.0], args={"harmless": {"mean": 1.0}})
    assert [(one.name, one.weight) for one in choose_rewards(reward, None)] == [("exact_match", 1.0), ("f1", 2.0)]
    models = [(one.name, one.path, one.weight, one.args) for one in chosen_models(reward)]
    assert models == [("helpful", "a", 3.0, {}), ("harmless", "b", 4.0, {"mean": 1.0})]
    alone = chosen_models(RewardConfig(model="a", args={"clip": 2.0}))
    assert [(one.name, one.path, one.weight, one.args) for one in alone] == [("model", "a", 1.0, {"clip": 2.0})]
    beside = chosen_models(RewardConfig(model="a", function="f1", weights=[1.0, 0.5], args={"model": {"clip": 2.0}}))
    assert [(one.name, one.weight, one.args) for one in beside] == [("model", 0.5, {"clip": 2.0})]
    assert chosen_models(RewardConfig(function="f1")) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"weights": [1.0, 2.0]},
            "reward.weights has 2 numbers and reward.function 2 names and reward.model 2 names; give one",
        ),
        (
            {"function": None, "weights": [1.0]},
            "reward.weights has 1 numbers and reward.model 2 names; give one weight",
        ),
        ({"model": {}}, "reward.model must be a path, or names of paths; got {}"),
        ({"model": {"a": 1}}, "reward.model must be a path, or names of paths; got {'a': 1}"),
        ({"args": {"helpful": 2}}, "reward.args.helpful must be options as name: value; got 2"),
        (
            {"args": {"helpful": {"deviation": 0.0}}},
            "reward.args.helpful.deviation must be positive and finite; got 0.0",
        ),
        (
            {"args": {"helpful": {"men": 1.0}}},
            "reward.args.helpful.men is not an argument of reward.model, which takes",
        ),
        (
            {"function": None, "args": {"f1": {}}},
            "reward.args.f1 has no effect: reward.model names helpful, harmless; leave it out",
        ),
        ({"function": None, "workers": 2}, "reward.workers=2 has no effect with reward.model; set it to 1"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    config = Config(reward=both(**settings))
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert str(refused.value).startswith(message)


def test_a_model_may_not_go_by_the_name_of_a_function() -> None:
    with pytest.raises(ConfigError, match="reward.function and reward.model both name 'f1', .*; rename the model"):
        choose_rewards(both(model={"f1": "a"}), None)
    with pytest.raises(ConfigError, match="reward.args.halpful has no effect: reward.function names no 'halpful'"):
        choose_rewards(both(args={"halpful": {}}), None)


def test_each_model_has_processes_of_its_own() -> None:
    config = Config(reward=both(model_replicas=2, weights=[1.0, 1.0, 1.0, 0.0]))
    check(config)
    assert gpu_plan(config).counts[ProcessKind.reward_model] == 4
    kinds = [slot.kind for slot in slots_of(config, on_gpus=True)]
    assert kinds.count(ProcessKind.reward_model) == 4
    assert num_waiting(config, ProcessKind.reward, 3) == 3
    config.reward.function, config.reward.weights = None, None
    assert num_waiting(config, ProcessKind.reward, 3) == 0
    config.trainer.ranks, config.cluster.roles = 2, ModelPlacement.shared
    assert gpu_plan(config).on_a_gpu(ProcessKind.reward_model) == 2


# -- the sum


class Says(Scorer):
    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    async def score(self, transcript: Transcript) -> Verdict:
        return self.verdict

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        return [Verdict(reward=float(place)) for place, _ in enumerate(transcripts)]


def scorer(*models: Verdict, functions: Verdict | None) -> ModelScorer:
    """Models named m0 and so on, whose weights are 1, 10, 100, ..."""
    named = [
        (ChosenReward(name=f"m{place}", function=None, weight=10.0**place), Says(verdict))
        for place, verdict in enumerate(models)
    ]
    return ModelScorer(named, functions and Says(functions))


async def test_scores_are_weighed_and_added_to_what_functions_say() -> None:
    functions = Verdict(reward=0.5, metrics={"rewards/f1": 0.25}, awaits_group=True)
    scores = Verdict(reward=2.0, metrics={"score": 7.0}), Verdict(reward=3.0)
    found = await scorer(*scores, functions=functions).score(said("x"))
    assert found.reward == 32.5 and found.awaits_group
    assert found.metrics == {"rewards/f1": 0.25, "rewards/m0": 2.0, "rewards/m0/score": 7.0, "rewards/m1": 3.0}
    alone = await scorer(*scores, functions=None).score(said("x"))
    assert alone.reward == 32.0 and not alone.awaits_group
    of_group = await scorer(*scores, functions=functions).score_group([said("x"), said("y")])
    assert [each.reward for each in of_group] == [0.0, 1.0]


async def test_if_one_fails_there_is_no_reward() -> None:
    failed = Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail="too long")
    found = await scorer(Verdict(reward=1.0), failed, functions=Verdict(reward=1.0)).score(said("x"))
    assert (found.reward, found.end, found.detail) == (None, EpisodeEnd.REWARD_TIMEOUT, "m1: too long")
    found = await scorer(Verdict(reward=1.0), functions=failed).score(said("x"))
    assert (found.reward, found.end) == (None, EpisodeEnd.REWARD_TIMEOUT)
