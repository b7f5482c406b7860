"""The greedy episode as baseline (ReMax, arXiv:2310.10505)."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scored
from rlflow.algorithms.base import Traits
from rlflow.errors import ConfigError


@Traits(needs_greedy=True, compares=False)
def remax(groups: Sequence[Group]) -> Advantages:
    """r - reward of the greedy episode of the same task.

    A group of equal rewards is not 0 here: all may be better than the greedy episode. Raises ConfigError if the greedy
    reward is unknown.
    """
    return [[[episode.reward - _greedy_reward(episode)] for episode in group] for group in groups]


def _greedy_reward(episode: Scored) -> float:
    if episode.baseline is None:
        raise ConfigError(
            "algorithm.advantage=remax compares with the greedy episode, but its reward is missing; play one for each "
            "group, or take rloo"
        )
    return episode.baseline
