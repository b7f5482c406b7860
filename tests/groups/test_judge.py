"""From played groups to groups with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_episode
from numpy_advantages import gigpo

from rlflow.algorithms.advantage.base import Scored, ScoredTurn
from rlflow.algorithms.registry import check_functions
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.groups.grading import Grader, components_of
from rlflow.types import EpisodeEnd, PlayedGroup, ReadyGroup, Task, TurnSummary

CUT_OFF = EpisodeEnd.TRUNCATED_LENGTH


def played(
    rewards: Sequence[float | None], ends: Sequence[EpisodeEnd] = (), lengths: Sequence[int] = ()
) -> PlayedGroup:
    ends = ends or [EpisodeEnd.COMPLETED] * len(rewards)
    lengths = lengths or [2] * len(rewards)
    episodes = [
        replace(make_episode(reward, 0, end), num_loss_tokens=length)
        for reward, end, length in zip(rewards, ends, lengths, strict=True)
    ]
    return PlayedGroup(group_id=1, episodes=episodes, payloads=list("abcdefgh"[: len(rewards)]), num_bytes=10)


def ready(config: Config, group: PlayedGroup, kind: str = "") -> ReadyGroup:
    found = Grader(config).ready(Task(id="t", prompt=(), kind=kind), group)
    assert found is not None
    return found


def whole(group: ReadyGroup) -> list[float]:
    """The advantages of a group whose episodes have one each."""
    return [value for values in group.advantages if values is not None for value in values]


def test_an_episode_without_a_verdict_is_left_out_of_the_statistics() -> None:
    group = ready(Config(), played([1.0, None, 0.0], [EpisodeEnd.COMPLETED, EpisodeEnd.REWARD_ERROR, CUT_OFF]))
    assert group.payloads == ["a", "c"]
    assert whole(group) == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_one_verdict_is_nothing_to_compare() -> None:
    assert Grader(Config()).ready(Task(id="t", prompt=()), played([1.0, None])) is None


def test_the_advantage_is_chosen_by_name() -> None:
    config = Config()
    config.algorithm.advantage = "rloo"
    assert whole(ready(config, played([1.0, 0.0, 0.0]))) == pytest.approx([1.0, -0.5, -0.5])


def test_an_advantage_over_the_batch_waits_for_the_step() -> None:
    config = Config()
    config.algorithm.advantage = "grpo_task_std"
    grader = Grader(config)
    assert grader.needs_batch
    groups = [ready(config, played(rewards), kind) for rewards, kind in (([4.0, 0.0], "a"), ([1.0, 0.0], "b"))]
    assert [group.advantages for group in groups] == [[], []]
    grader.assign(groups)
    # Each kind of task has a deviation of its own, so that large rewards do not drown small ones.
    assert whole(groups[0]) == pytest.approx(whole(groups[1]), abs=1e-4)


def test_dynamic_sampling_passes_over_equal_rewards() -> None:
    config = Config()
    config.algorithm.dynamic_sampling = True
    grader = Grader(config)
    assert grader.is_filtered(ready(config, played([1.0, 1.0])))
    assert not grader.is_filtered(ready(config, played([1.0, 0.0])))
    assert not Grader(Config()).is_filtered(ready(config, played([1.0, 1.0])))


def test_dynamic_sampling_compares_what_was_said_and_not_how_long_it_took() -> None:
    config = Config()
    config.rollout.max_new_tokens, config.algorithm.overlong_tokens = 100, 50
    config.algorithm.dynamic_sampling = True
    solved = ready(config, played([1.0, 1.0], lengths=[50, 100]))
    assert Grader(config).is_filtered(solved)


def test_dynamic_sampling_may_compare_a_part_of_the_reward() -> None:
    config = Config()
    config.algorithm.dynamic_sampling, config.algorithm.filter_on = True, "accuracy"
    grader, group = Grader(config), ready(config, played([1.0, 0.75]))
    for index, brevity in enumerate((1.0, 0.5)):
        parts = {"rewards/accuracy": 1.0, "rewards/brevity": brevity}
        group.episodes[index] = replace(group.episodes[index], metrics=parts)
    assert grader.is_filtered(group)
    config.algorithm.filter_on = "brevity"
    assert not grader.is_filtered(group)
    config.algorithm.filter_on = "speed"
    with pytest.raises(ConfigError, match="filter_on=speed is no part of the reward; its parts are accuracy, brevity"):
        grader.is_filtered(group)


def test_truncated_episodes_are_compared_with_and_not_trained_on() -> None:
    config = Config()
    config.algorithm.mask_truncated = True
    grader = Grader(config)
    group = ready(config, played([1.0, 0.0], [EpisodeEnd.COMPLETED, CUT_OFF]))
    assert group.advantages == [[pytest.approx(0.5**0.5, abs=1e-5)], None]
    assert not grader.is_filtered(group)
    assert grader.is_filtered(ready(config, played([1.0, 0.0], [CUT_OFF, CUT_OFF])))


def test_a_long_reply_loses_reward() -> None:
    config = Config()
    config.rollout.max_new_tokens, config.algorithm.overlong_tokens = 100, 50
    config.algorithm.advantage = "dr_grpo"
    # Penalties 0, -0.5 and -1, so that the rewards are 1, 0.5 and 0.
    group = ready(config, played([1.0, 1.0, 1.0], lengths=[50, 75, 100]))
    assert whole(group) == pytest.approx([0.5, 0.0, -0.5])
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0, 1.0]


def test_turns_have_advantages_of_their_own() -> None:
    config = Config()
    config.algorithm.advantage, config.algorithm.advantage_args = "gigpo", {"normalise": False, "discount": 0.5}
    group = played([1.0, 0.0])
    for index, anchors in enumerate((["door", "key"], ["door", "wall"])):
        turns = tuple(
            TurnSummary(anchor=anchor, num_loss_tokens=1, place=place) for place, anchor in enumerate(anchors)
        )
        group.episodes[index] = replace(group.episodes[index], turns=turns)
    # Episodes: +-0.5. Returns from the door: 0.5 and 0, so +-0.25 more; the other states were met once.
    assert ready(config, group).advantages == [[0.75, 0.5], [-0.75, -0.5]]


def test_turns_have_the_rewards_that_the_environment_gave_them_in_the_order_of_time() -> None:
    """Another agent's reply lies between two of the first agent's, and is a sample of its own behind them."""
    config = Config()
    config.algorithm.advantage = "gigpo"
    config.algorithm.advantage_args = {"normalise": False, "discount": 0.5}
    config.rollout.max_new_tokens, config.algorithm.overlong_tokens = 100, 50
    group = played([1.0, 0.0])
    rewards = {"door": 0.25, "end": 0.5, "other": 0.25}
    for index, (places, scale) in enumerate((({"door": 0, "end": 2, "other": 1}, 1.0), ({"door": 0}, 0.0))):
        turns = tuple(
            TurnSummary(anchor=anchor, num_loss_tokens=1, place=place, reward=scale * rewards[anchor])
            for anchor, place in places.items()
        )
        group.episodes[index] = replace(group.episodes[index], turns=turns)
    # From the door: 0.25 + 0.5 (0.25 + 0.5 * 0.5) = 0.5 and 0, so +-0.25; from the other states +-0 beside +-0.5.
    assert ready(config, group).advantages == [[0.75, 0.5, 0.5], [-0.75]]


@pytest.mark.parametrize("seed", range(20))
def test_gigpo_of_dense_rewards_is_that_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    config = Config()
    config.algorithm.advantage, config.algorithm.advantage_args = "gigpo", {"discount": 0.9}
    episodes = [
        [
            (int(place), str(random.choice(["a", "b", "c"])), float(random.normal()))
            for place in random.permutation(count)
        ]
        for count in random.integers(2, 6, size=5)
    ]
    group = played([sum(reward for *_, reward in turns) for turns in episodes])
    for index, turns in enumerate(episodes):
        summaries = tuple(
            TurnSummary(anchor=state, num_loss_tokens=1, place=place, reward=reward) for place, state, reward in turns
        )
        group.episodes[index] = replace(group.episodes[index], turns=summaries)
    in_time = [
        Scored(
            reward=sum(reward for *_, reward in turns),
            num_loss_tokens=len(turns),
            turns=[ScoredTurn(anchor=state, reward=reward, num_loss_tokens=1) for _, state, reward in sorted(turns)],
        )
        for turns in episodes
    ]
    (rows,) = gigpo([in_time], discount=0.9)
    for found, turns, row in zip(ready(config, group).advantages, episodes, rows, strict=True):
        assert found == pytest.approx([row[place] for place, *_ in turns], rel=1e-6, abs=1e-9)


def test_remax_compares_with_the_greedy_episode() -> None:
    config = Config()
    config.algorithm.advantage = "remax"
    grader = Grader(config)
    assert grader.needs_greedy
    group = ready(config, played([1.0, 0.0, 0.25]))
    assert (group.payloads, group.baseline) == (["a", "b"], 0.25)
    assert group.advantages == [[0.75], [-0.25]]
    assert grader.ready(Task(id="t", prompt=()), played([1.0, 0.0, None])) is None


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp", "remax"])
def test_an_advantage_that_compares_no_episodes_takes_one(advantage: str) -> None:
    config = Config()
    config.algorithm.advantage, config.algorithm.group_size = advantage, 1
    check_functions(config)
    grader = Grader(config)
    rewards = [1.0, 0.25] if grader.needs_greedy else [1.0]
    group = grader.ready(Task(id="t", prompt=()), played(rewards))
    assert group is not None and group.payloads == ["a"]
    config.algorithm.advantage = "grpo"
    assert Grader(config).ready(Task(id="t", prompt=()), played([1.0])) is None
    with pytest.raises(ConfigError, match="must be at least 2 with algorithm.advantage=grpo, which compares"):
        check_functions(config)


def test_the_greedy_episode_is_punished_for_its_length_too() -> None:
    config = Config()
    config.rollout.max_new_tokens, config.algorithm.overlong_tokens = 100, 50
    config.algorithm.advantage = "remax"
    assert whole(ready(config, played([1.0, 1.0, 1.0], lengths=[100, 50, 100]))) == [0.0, 1.0]


def test_the_parts_of_a_reward_are_its_functions_or_what_the_only_one_says_beside_its_number() -> None:
    metrics = {"turns": 2.0, "rewards/math": 1.0, "rewards/math/parsed": 0.5, "rewards/brief": 0.25}
    assert components_of(metrics) == {"math": 1.0, "brief": 0.25}
    del metrics["rewards/brief"]
    assert components_of(metrics) == {"parsed": 0.5}
