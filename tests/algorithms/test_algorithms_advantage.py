"""Advantage estimators, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rlflow.algorithms.advantage.base import Advantages, Scored, ScoredTurn
from rlflow.algorithms.advantage.dr_grpo import dr_grpo
from rlflow.algorithms.advantage.eapo import eapo
from rlflow.algorithms.advantage.gdpo import gdpo
from rlflow.algorithms.advantage.gigpo import gigpo
from rlflow.algorithms.advantage.grpo import grpo
from rlflow.algorithms.advantage.grpo_batch_std import grpo_batch_std
from rlflow.algorithms.advantage.grpo_task_std import grpo_task_std
from rlflow.algorithms.advantage.maxrl import maxrl
from rlflow.algorithms.advantage.opo import opo
from rlflow.algorithms.advantage.passk import passk
from rlflow.algorithms.advantage.reinforce_pp import reinforce_pp
from rlflow.algorithms.advantage.reinforce_pp_baseline import reinforce_pp_baseline
from rlflow.algorithms.advantage.remax import remax
from rlflow.algorithms.advantage.rloo import rloo
from rlflow.algorithms.registry import CATALOGS, Kind, resolve
from rlflow.algorithms.token_advantage.gae import Moments, gae, token_rewards, whiten
from rlflow.errors import ConfigError


def scored(*rewards: float, lengths: Sequence[int] | None = None, kind: str = "") -> list[Scored]:
    """One group."""
    counts = lengths or [1] * len(rewards)
    return [
        Scored(reward=reward, num_loss_tokens=count, task_kind=kind)
        for reward, count in zip(rewards, counts, strict=True)
    ]


def turn(anchor: str, reward: float = 0.0) -> ScoredTurn:
    return ScoredTurn(anchor=anchor, reward=reward, num_loss_tokens=1)


def check(found: Advantages, expected: list[list[list[float]]], rel: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for group, others in zip(found, expected, strict=True):
        assert len(group) == len(others)
        for values, numbers in zip(group, others, strict=True):
            assert values == pytest.approx(numbers, rel=rel, abs=1e-15)


def test_grpo_divides_by_the_sample_deviation() -> None:
    # mean 0.5; squared deviations 4 x 0.25; sample variance 1/3
    high = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    check(grpo([scored(1.0, 0.0, 0.0, 1.0)]), [[[high], [-high], [-high], [high]]])


def test_dr_grpo_subtracts_the_mean_only() -> None:
    check(dr_grpo([scored(1.0, 0.0, 0.0, 0.0)]), [[[0.75], [-0.25], [-0.25], [-0.25]]])


def test_rloo_leaves_the_episode_itself_out() -> None:
    check(rloo([scored(1.0, 0.0, 0.0), scored(3.0, 1.0)]), [[[1.0], [-0.5], [-0.5]], [[2.0], [-2.0]]])


def test_opo_weighs_the_baseline_by_length() -> None:
    check(opo([scored(1.0, 0.0, lengths=[1, 3])]), [[[0.75], [-0.25]]])


def test_passk_rewards_the_lead_of_the_best() -> None:
    groups = [scored(0.25, 1.0, 0.5), scored(1.0, 1.0, 0.0)]
    check(passk(groups), [[[0.0], [0.5], [0.0]], [[0.0], [0.0], [0.0]]])
    # mean 0.5; squared deviations 0.25 and 0.25; sample variance 0.25
    check(passk([scored(0.0, 1.0, 0.5)], normalise=True), [[[0.0], [0.5 / (0.5 + 1e-6)], [0.0]]])


def test_maxrl_divides_by_the_rate_of_success() -> None:
    check(maxrl([scored(1.0, 0.0, 0.0, 0.0)]), [[[3.0], [-1.0], [-1.0], [-1.0]]])
    with pytest.raises(ConfigError, match="maxrl needs rewards of at least 0; got -1"):
        maxrl([scored(1.0, -1.0)])


def test_remax_compares_with_the_greedy_episode() -> None:
    check(remax([[Scored(reward=1.0, num_loss_tokens=1, baseline=0.25)]]), [[[0.75]]])
    with pytest.raises(ConfigError, match="remax compares with the greedy episode, but its reward is missing"):
        remax([scored(1.0)])


def test_gdpo_standardises_each_component() -> None:
    groups = [
        [Scored(reward=0.0, num_loss_tokens=1, rewards={"a": a, "b": 0.3}) for a in (1.0, 0.0)],
        [Scored(reward=0.0, num_loss_tokens=1, rewards={"a": 1.0, "b": 0.3}) for _ in range(2)],
    ]
    # a is +-sqrt(1/2) in the first group and 0 in the second; the deviation of all four is sqrt(1/3)
    high = math.sqrt(3 / 2)
    check(gdpo(groups), [[[high], [-high]], [[0.0], [0.0]]], rel=1e-5)
    check(gdpo(groups, weights={"b": 1.0}), [[[0.0], [0.0]], [[0.0], [0.0]]])
    with pytest.raises(ConfigError, match="gdpo needs the reward's component 'c' of every episode; one has a, b"):
        gdpo(groups, weights={"c": 1.0})
    with pytest.raises(ConfigError, match="gdpo needs a reward with components"):
        gdpo([scored(1.0, 0.0)])


def test_reinforce_pp_whitens_over_tokens() -> None:
    # tokens 1 1 1 0: mean 0.75, variance 0.1875
    groups = [scored(1.0, lengths=[3]), scored(0.0, lengths=[1])]
    check(reinforce_pp(groups), [[[math.sqrt(1 / 3)]], [[-math.sqrt(3)]]], rel=1e-6)


def test_reinforce_pp_baseline_whitens_what_the_group_leaves() -> None:
    # tokens 0.5 -0.5 0 0: mean 0, variance 0.125
    groups = [scored(1.0, 0.0), scored(1.0, lengths=[2])]
    check(reinforce_pp_baseline(groups), [[[math.sqrt(2)], [-math.sqrt(2)]], [[0.0]]], rel=1e-6)


def test_grpo_batch_std_divides_by_the_deviation_of_the_batch() -> None:
    # rewards 1 0 1 1: squared deviations 0.75, sample variance 0.25
    one = 0.5 / (0.5 + 1e-6)
    check(grpo_batch_std([scored(1.0, 0.0), scored(1.0, 1.0)]), [[[one], [-one]], [[0.0], [0.0]]])


def test_grpo_task_std_divides_by_the_deviation_of_the_kind() -> None:
    groups = [scored(1.0, 0.0, kind="a"), scored(4.0, 0.0, kind="b"), scored(1.0, 1.0, kind="a")]
    one, other = 0.5 / (0.5 + 1e-6), 2 / (math.sqrt(8) + 1e-6)
    check(grpo_task_std(groups), [[[one], [-one]], [[other], [-other]], [[0.0], [0.0]]])


def test_gigpo_compares_turns_from_the_same_state() -> None:
    group = [
        Scored(reward=1.0, num_loss_tokens=2, turns=[turn("start"), turn("door", 1.0)]),
        Scored(reward=0.0, num_loss_tokens=1, turns=[turn("start")]),
    ]
    # episodes +-0.5; returns from the start 0.5 and 0; the door is met once
    check(gigpo([group], discount=0.5, normalise=False), [[[0.75, 0.5], [-0.75]]])
    check(gigpo([group], discount=0.5, normalise=False, step_weight=0.0), [[[0.5, 0.5], [-0.5]]])
    with pytest.raises(ConfigError, match="gigpo gives each turn its own advantage, but an episode has no turns"):
        gigpo([scored(1.0, 0.0)])


def test_eapo_prefers_the_last_turns_and_short_episodes() -> None:
    group = [
        Scored(reward=1.0, num_loss_tokens=2, turns=[turn("a"), turn("b")]),
        Scored(reward=0.0, num_loss_tokens=1, turns=[turn("a")]),
    ]
    # returns 0.5 1 and 0: mean 0.5, sample deviation 0.5
    one = 0.5 / (0.5 + 1e-6)
    check(eapo([group], discount=0.5), [[[0.0, one], [-one]]])
    with pytest.raises(ConfigError, match="discount must be above 0 and at most 1; got 0"):
        eapo([group], discount=0)


def always_zero() -> list[str]:
    """Estimators for which equal rewards say nothing; the others compare with something else than the group."""
    return [name for name in CATALOGS[Kind.advantage].shipped if name not in ("remax", "reinforce_pp", "reward")]


@pytest.mark.parametrize("name", always_zero())
@pytest.mark.parametrize("size", [1, 3])
def test_a_group_of_equal_rewards_gives_exactly_zero(name: str, size: int) -> None:
    def episode(reward: float) -> Scored:
        turns = [turn("s", reward)]
        return Scored(reward=reward, num_loss_tokens=3, rewards={"a": reward}, turns=turns, log_ratio=0.0)

    groups = [[episode(0.1)] * size, [episode(0.0), episode(0.9), episode(0.7)]]
    found = resolve(Kind.advantage, name).function(groups)
    assert found[0] == [[0.0]] * size
    assert any(values != [0.0] for values in found[1])


@pytest.mark.parametrize("name", CATALOGS[Kind.advantage].shipped)
def test_no_groups_and_empty_groups_are_fine(name: str) -> None:
    assert resolve(Kind.advantage, name).function([]) == []
    assert resolve(Kind.advantage, name).function([[]]) == [[]]


def test_gae_skips_tokens_without_loss() -> None:
    mask = np.array([True, False, True])
    found = gae(np.array([0.0, 9.0, 1.0]), np.array([0.5, 7.0, 0.25]), mask, trace=0.5)
    assert found.advantages.tolist() == [0.125, 0.0, 0.75]
    assert found.returns.tolist() == [0.625, 0.0, 1.0]


def test_gae_of_nothing_is_nothing() -> None:
    found = gae(np.ones(2), np.ones(2), np.zeros(2, bool))
    assert found.advantages.tolist() == found.returns.tolist() == [0.0, 0.0]


def test_the_reward_of_a_turn_sits_on_its_last_token() -> None:
    logprobs, reference = np.array([-1.0, -2.0, -1.0, -1.0]), np.array([-2.0, -1.0, -1.5, -1.0])
    mask, ends = np.array([True, False, True, False]), np.array([0, 2])
    found = token_rewards([0.5, 1.0], ends, logprobs, reference, mask, 0.1)
    assert found.tolist() == pytest.approx([0.4, 0.0, 0.95, 0.0])


def test_whitening_with_the_moments_of_two_ranks_is_whitening_the_whole() -> None:
    values, mask = np.array([1.0, 50.0, 3.0, 5.0, 7.0]), np.array([True, False, True, True, True])
    parts = Moments.of(values[:3], mask[:3]).plus(Moments.of(values[3:], mask[3:]))
    assert parts == Moments.of(values, mask) == (4.0, 16.0, 84.0)
    # mean 4, variance 5
    expected = np.array([-3.0, 0.0, -1.0, 1.0, 3.0]) / math.sqrt(5)
    np.testing.assert_allclose(whiten(values, mask, parts), expected, rtol=1e-8)
    same = np.full(3, 0.1)
    assert whiten(same, np.ones(3, bool), Moments.of(same, [1.0] * 3)).tolist() == [0.0, 0.0, 0.0]
