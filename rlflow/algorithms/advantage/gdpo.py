"""Rewards of several components, each standardised by itself (GDPO, arXiv:2601.05242)."""

from collections.abc import Mapping, Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scope, deviation, divide, standardise, whole_episodes
from rlflow.algorithms.base import Traits
from rlflow.errors import ConfigError


@Traits(scope=Scope.batch)
def gdpo(groups: Sequence[Group], *, weights: Mapping[str, float] | None = None) -> Advantages:
    """sum over components of weight * (r - mean) / (deviation + 1e-6) of the group, then / deviation of the batch.

    None weighs every component by 1; a component without a weight is left out. The mean of the batch is 0 by
    construction and is not subtracted, so that a group in which nothing differs stays at exactly 0.

    Raises ConfigError if an episode lacks a component.
    """
    if not any(groups):
        return [[] for _ in groups]
    if weights is None:
        weights = {name: 1.0 for group in groups for episode in group for name in episode.rewards}
    if not weights:
        raise ConfigError(
            "algorithm.advantage=gdpo needs a reward with components; this one has none; return them, or take grpo"
        )
    sums = [_weighted_sum(group, weights) for group in groups]
    scale = deviation([value for group in sums for value in group])
    return [whole_episodes(divide(group, scale)) for group in sums]


def _weighted_sum(group: Group, weights: Mapping[str, float]) -> list[float]:
    sums = [0.0] * len(group)
    for name, weight in weights.items():
        for episode in group:
            if name not in episode.rewards:
                raise ConfigError(
                    f"algorithm.advantage=gdpo needs the reward's component {name!r} of every episode; one has "
                    f"{', '.join(sorted(episode.rewards)) or 'none'}"
                )
        for index, value in enumerate(standardise([episode.rewards[name] for episode in group])):
            sums[index] += weight * value
    return sums
