"""The figures of an evaluation, by hand."""

from __future__ import annotations

import itertools

import pytest
from fakes import make_episode

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.groups.evaluation import HeldOut
from rlflow.groups.scores import pass_at, scores_of
from rlflow.settings.stop_when import StopRule, check_stop
from rlflow.telemetry.metrics import check_metric
from rlflow.types import EpisodeEnd, EpisodeSummary, Task


def tasks(*kinds: str) -> list[Task]:
    return [Task(id=f"t{index}", prompt=(), kind=kind) for index, kind in enumerate(kinds)]


def failed() -> EpisodeSummary:
    return make_episode(None, 1, end=EpisodeEnd.ENVIRONMENT_ERROR)


def cut(reward: float) -> EpisodeSummary:
    return make_episode(reward, 1, end=EpisodeEnd.TRUNCATED_LENGTH)


def test_pass_at_k_is_the_share_of_draws_of_k_episodes_in_which_one_passes() -> None:
    rewards = [1.0, 0.0, 0.99, 1.5, 0.0]
    for k in (1, 2, 4):
        draws = list(itertools.combinations(rewards, k))
        assert pass_at(k, [rewards]) == pytest.approx(sum(max(draw) >= 1 for draw in draws) / len(draws))
    assert pass_at(2, [[1.0, 0.0, 0.0], [0.0, 0.0], [1.0]]) == pytest.approx((2 / 3 + 0) / 2)


def test_the_figures_of_three_tasks_of_two_kinds() -> None:
    """Rewards 1, 0 | 1, 1 | 0.5, failed: mean 3.5 / 5; sums of differences from it, by task: -0.4, 0.6, -0.2."""
    episodes = [
        [make_episode(1.0, 1), cut(0.0)],
        [make_episode(1.0, 1), make_episode(1.0, 1)],
        [make_episode(0.5, 1), failed()],
    ]
    every, add, text = scores_of(tasks("add", "add", "text"), episodes, is_greedy=False)
    assert every.record() == {
        "eval/reward": pytest.approx(0.7),
        "eval/reward_low": pytest.approx(0.7 - 1.96 * (1.5 * 0.56) ** 0.5 / 5),
        "eval/reward_high": pytest.approx(0.7 + 1.96 * (1.5 * 0.56) ** 0.5 / 5),
        "eval/tasks": 3,
        "eval/episodes": 5,
        "eval/failed": 1,
        "eval/truncated": pytest.approx(0.2),
        "eval/pass_at_1": pytest.approx((0.5 + 1 + 0) / 3),
        "eval/pass_at_2": 1.0,  # of the two tasks with two verdicts
    }
    assert (add.kind, add.reward, add.num_failed) == ("add", 0.75, 0)
    assert text.record() | {"eval/kind/text/reward": None} == {
        "eval/kind/text/reward": None,
        "eval/kind/text/reward_low": None,  # one task has no spread
        "eval/kind/text/reward_high": None,
        "eval/kind/text/tasks": 1,
        "eval/kind/text/episodes": 1,
        "eval/kind/text/failed": 1,
        "eval/kind/text/truncated": 0.0,
        "eval/kind/text/pass_at_1": 0.0,
    }


def test_an_evaluation_in_which_all_failed_has_no_reward_and_one_kind_is_not_told_apart() -> None:
    (greedy,) = scores_of(tasks("add", "add"), [[failed()], [failed()]], is_greedy=True)
    found = greedy.record()
    assert (found["eval/greedy/reward"], found["eval/greedy/failed"], found["eval/greedy/truncated"]) == (None, 2, None)


def test_the_best_is_the_first_with_the_highest_reward_after_a_step() -> None:
    records = [{"step": step, "eval/reward": reward} for step, reward in enumerate((0.9, 0.2, None, 0.5, 0.5, 0.4))]
    held_out = HeldOut.of(records)
    assert held_out.best == 3
    assert str(held_out) == "held-out 0.900 -> 0.400 (best 0.500 at step 3)"
    assert (HeldOut().best, str(HeldOut())) == (None, "")


@pytest.mark.parametrize(
    ("text", "metrics", "expected"),
    [
        ("eval/reward>=0.9", {"eval/reward": 0.9}, True),
        ("eval/reward >= 0.9", {"eval/reward": 0.89}, False),
        ("eval/reward>=0.9", {"eval/reward": None}, False),
        ("eval/reward>=0.9", {"reward": 1.0}, False),
        ("entropy<1e-1", {"entropy": 0.05}, True),
        ("kl>.5", {"kl": 0.5}, False),
        ("loss<=-1", {"loss": -1.0}, True),
    ],
)
def test_a_stop_rule_is_met_or_not(text: str, metrics: dict[str, float | int | None], expected: bool) -> None:
    assert StopRule.of(text).is_met(metrics) is expected


@pytest.mark.parametrize(
    ("text", "every", "message"),
    [
        ("reward", 1, "run.stop_when must be a metric and a bound, such as 'eval/reward>=0.9' or 'entropy<0.1'; got"),
        ("reward=>1", 1, "must be a metric and a bound"),
        ("reward>=high", 1, "must be a metric and a bound"),
        ("eval/reward>=0.9", 0, "run.stop_when=eval/reward>=0.9 needs evaluations; set eval.every"),
        ("eval/rewards>=0.9", 1, "has no eval/rewards; did you mean eval/reward?"),
        ("eval/pass_at_4>=0.9", 1, "an evaluation with eval.episodes=2 has no eval/pass_at_4"),
    ],
)
def test_a_stop_rule_that_cannot_be_met_is_refused(text: str, every: int, message: str) -> None:
    config = Config()
    config.run.stop_when, config.eval.every, config.eval.episodes = text, every, 2
    with pytest.raises(ConfigError, match=message):
        check_stop(config)


def test_the_names_of_metrics_are_known_as_far_as_they_can_be() -> None:
    for name in ("reward", "entropy", "rewards/brief/mean", "eval/kind/add/reward", "critic/loss", "staleness/mean"):
        check_metric(name)
    with pytest.raises(ConfigError, match="no run records rewrad; did you mean reward"):
        check_metric("rewrad")
    with pytest.raises(ConfigError, match="no run records trainer/loss"):
        check_metric("trainer/loss")
