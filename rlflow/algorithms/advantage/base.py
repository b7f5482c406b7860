"""What advantage estimators take and return, and the statistics that they share.

groups of scored episodes -> group -> episode -> one advantage for the whole episode, or one for each of its turns
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from rlflow.errors import ConfigError

EPSILON = 1e-6
"""Added to a deviation before it divides."""


class Scope(StrEnum):
    """What an estimator must see at once."""

    group = "group"
    """One group is enough, so groups may be trained on as they arrive."""
    batch = "batch"
    """Every group of the step: its statistics run over all of them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredTurn:
    """One reply of the policy within an episode."""

    anchor: str
    """What the policy saw, such as a hash of the observation; equal anchors of a group are the same state."""
    reward: float
    """What the environment gave for this turn; the last turn's also has what the episode earned besides."""
    num_loss_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Scored:
    """What an estimator may know of one episode.

    Example: Scored(reward=1.0, num_loss_tokens=120)
    """

    reward: float
    num_loss_tokens: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name."""
    task_kind: str = ""
    """The kind of task; statistics of a kind run over the batch."""
    turns: Sequence[ScoredTurn] = ()
    """In the order of time; their rewards add up to `reward`."""
    baseline: float | None = None
    """Reward of the greedy episode of the same task."""
    log_ratio: float | None = None
    """log(policy / reference) of all loss tokens together before the update, in nats."""


Group: TypeAlias = Sequence[Scored]
Advantages: TypeAlias = list[list[list[float]]]
"""Group -> episode -> one value for the whole episode, or one for each turn."""


AdvantageFunction: TypeAlias = Callable[[Sequence[Group]], Advantages]
"""An estimator with its options bound. With Scope.group the result for a group depends on that group alone."""


def all_equal(values: Sequence[float]) -> bool:
    """Whether nothing is better than anything else. Means of equal numbers round; this does not."""
    return not values or min(values) == max(values)


def centre(values: Sequence[float]) -> list[float]:
    """values - mean; exactly 0 if all are equal."""
    if all_equal(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample (divisor n - 1); exactly 0 if all are equal, a single one included."""
    return 0.0 if all_equal(values) else statistics.stdev(values)


def divide(values: Sequence[float], scale: float) -> list[float]:
    """values / (scale + 1e-6)."""
    return [value / (scale + EPSILON) for value in values]


def standardise(values: Sequence[float]) -> list[float]:
    """(values - mean) / (deviation + 1e-6); exactly 0 if all are equal."""
    return divide(centre(values), deviation(values))


def rewards_of(group: Group) -> list[float]:
    return [episode.reward for episode in group]


def whole_episodes(values: Sequence[float]) -> list[list[float]]:
    """One value an episode, in the shape of Advantages."""
    return [[value] for value in values]


def require_turns(name: str, groups: Sequence[Group]) -> None:
    if any(not episode.turns for group in groups for episode in group):
        raise ConfigError(
            f"algorithm.advantage={name} gives each turn its own advantage, but an episode has no turns; use it with "
            "an environment of several turns, or take grpo"
        )
