"""From a group that was played to one that can be trained on.

    PlayedGroup -> the episodes with a verdict -> shaped rewards -> advantages -> ReadyGroup

Rule: an episode that failed has no reward, and the group's statistics are as if it had not been played.
"""

from collections.abc import Mapping, Sequence

from rlflow.algorithms.advantage.base import Scope, Scored, ScoredTurn, all_equal
from rlflow.algorithms.distillation import num_likely
from rlflow.algorithms.overlong import overlong_penalty
from rlflow.algorithms.preferences import preference_metrics
from rlflow.algorithms.registry import chosen_advantage
from rlflow.algorithms.turns import earned, in_time
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.roles import Mean
from rlflow.runtime.derived import learns_from_rewards
from rlflow.types import EpisodeEnd, EpisodeSummary, PlayedGroup, ReadyGroup, Task

_UNSCORED = {EpisodeEnd.REWARD_ERROR, EpisodeEnd.REWARD_TIMEOUT, EpisodeEnd.REWARD_INVALID, EpisodeEnd.NO_VERDICT}
"""Ends of episodes that were played and could not be scored."""
LIKELY_BYTES = 8
"""Of a token that a teacher finds likely, with its log-probability."""


class Grader:
    """The algorithm's view of rewards. Metadata only."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an advantage that cannot be found, or options that it does not take."""
        self._algorithm = config.algorithm
        self._max_new_tokens = config.rollout.max_new_tokens
        self._has_rewards = learns_from_rewards(config)
        self._advantage = chosen_advantage(config)
        self._num_likely = num_likely(config.teacher)

    @property
    def needs_batch(self) -> bool:
        """Whether a group's advantages need all groups of its step; see `assign`."""
        return self._advantage.traits.scope is Scope.batch

    @property
    def needs_log_ratios(self) -> bool:
        """Whether `assign` reads what the trainer leaves with the groups when it prepares them."""
        return self._advantage.traits.needs_log_ratios

    @property
    def needs_greedy(self) -> bool:
        """Whether a group has one greedy episode more, its last, which is not trained on."""
        return self._advantage.traits.needs_greedy

    def ready(self, task: Task, played: PlayedGroup) -> ReadyGroup | None:
        """The trainable part of a group; None when too few episodes, or not the greedy one, have a verdict.

        An advantage that compares needs two.
        """
        baseline = None
        pairs = list(zip(played.episodes, played.payloads, strict=True))
        if self.needs_greedy:
            greedy, _ = pairs.pop()
            if not greedy.is_trainable:
                return None
            baseline = self._shaped_reward(greedy)
        kept = [(summary, payload) for summary, payload in pairs if self._counts(summary)]
        if len(kept) < 1 + self._advantage.traits.compares:
            return None
        num_loss_tokens = sum(summary.num_loss_tokens for summary, _ in kept)
        ready = ReadyGroup(
            group_id=played.group_id,
            task_id=task.id,
            task_kind=task.kind,
            episodes=[summary for summary, _ in kept],
            payloads=[payload for _, payload in kept],
            advantages=[],
            baseline=baseline,
            num_bytes=played.num_bytes + LIKELY_BYTES * self._num_likely * num_loss_tokens,
            num_images=played.num_images,
            pictures=played.pictures,
        )
        if not self.needs_batch:
            self._set_advantages([ready])
        return ready

    def _counts(self, episode: EpisodeSummary) -> bool:
        """Whether an episode is trained on. Without a reward it is if none is wanted and it was played to its end."""
        was_played = not episode.end.is_error or episode.end in _UNSCORED
        return episode.is_trainable or (was_played and not self._has_rewards)

    def is_filtered(self, group: ReadyGroup) -> bool:
        """Whether there is nothing to learn from a group, so that another task is played instead.

        Dynamic sampling drops groups in which no episode was better than another. If episodes that were cut off are
        masked, at least one must remain.
        """
        if self._algorithm.mask_truncated and all(episode.end.is_truncated for episode in group.episodes):
            return True
        return self._algorithm.dynamic_sampling and all_equal([self._filtered_on(one) for one in group.episodes])

    def _filtered_on(self, episode: EpisodeSummary) -> float:
        """What dynamic sampling compares. Raises ConfigError for a reward without the part that the settings name."""
        name = self._algorithm.filter_on
        if name is None:
            assert episode.reward is not None, "only episodes with a verdict are compared"
            return episode.reward
        parts = components_of(episode.metrics)
        if name not in parts:
            raise ConfigError(
                f"algorithm.filter_on={name} is no part of the reward; its parts are "
                f"{', '.join(sorted(parts)) or 'none'}; name one of them, or set it to null"
            )
        return parts[name]

    def assign(self, groups: Sequence[ReadyGroup]) -> None:
        """Give the groups of a step their advantages, if these depend on the whole step, or on the model."""
        if self.needs_batch:
            self._set_advantages(groups)

    def preferences(self, groups: Sequence[ReadyGroup]) -> dict[str, Mean]:
        """What the log-ratios of a step say; see `preference_metrics`."""
        return preference_metrics([self._scored(group) for group in groups])

    def _set_advantages(self, groups: Sequence[ReadyGroup]) -> None:
        found = self._advantage.function(
            [self._scored(group) if self._has_rewards else group.episodes for group in groups]
        )
        for group, advantages in zip(groups, found, strict=True):
            masks = self._algorithm.mask_truncated
            group.advantages = [
                None if masks and episode.end.is_truncated else _by_sample(episode, values)
                for episode, values in zip(group.episodes, advantages, strict=True)
            ]

    def _scored(self, group: ReadyGroup) -> list[Scored]:
        ratios = group.log_ratios or [None] * len(group.episodes)
        return [self._score(group, *each) for each in zip(group.episodes, ratios, strict=True)]

    def _score(self, group: ReadyGroup, episode: EpisodeSummary, log_ratio: float | None) -> Scored:
        reward, turns = self._shaped_reward(episode), episode.turns
        rewards = earned(turns, reward) if turns else []
        return Scored(
            reward=reward,
            num_loss_tokens=episode.num_loss_tokens,
            rewards=components_of(episode.metrics),
            task_kind=group.task_kind,
            turns=[
                ScoredTurn(
                    anchor=turns[index].anchor, reward=rewards[index], num_loss_tokens=turns[index].num_loss_tokens
                )
                for index in in_time(turns)
            ],
            baseline=group.baseline,
            log_ratio=log_ratio,
        )

    def _shaped_reward(self, episode: EpisodeSummary) -> float:
        """The reward of the verdict, less the penalty for the longest reply."""
        assert episode.reward is not None, "only episodes with a verdict are scored"
        cache = self._algorithm.overlong_tokens
        if cache is None:
            return episode.reward
        longest = max((turn.num_loss_tokens for turn in episode.turns), default=episode.num_loss_tokens)
        return episode.reward + overlong_penalty(longest, max_length=self._max_new_tokens, cache=cache)


def _by_sample(episode: EpisodeSummary, values: list[float]) -> list[float]:
    """Values of turns, from the order of time into that of the samples; the one value of an episode stays."""
    if len(values) < 2:
        return values
    by_turn = dict(zip(in_time(episode.turns), values, strict=True))
    return [by_turn[index] for index in range(len(values))]


def components_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The parts of a reward by name: several functions, or what a single function reports beside its reward.

    Example: {"rewards/math": 1.0, "rewards/brief": 0.5, "turns": 2.0} -> {"math": 1.0, "brief": 0.5}
    """
    named = {name.removeprefix("rewards/"): value for name, value in metrics.items() if name.startswith("rewards/")}
    functions = {name: value for name, value in named.items() if "/" not in name}
    if len(functions) > 1:
        return functions
    return {name.partition("/")[2]: value for name, value in named.items() if "/" in name}


def why_no_verdict(episodes: Sequence[EpisodeSummary]) -> str:
    failed = [episode for episode in episodes if not episode.is_trainable]
    first = f": {failed[0].detail}" if failed and failed[0].detail else ""
    ends = ", ".join(sorted({episode.end.value for episode in failed}))
    return f"{len(failed)} of {len(episodes)} episodes have no verdict ({ends}){first}"
