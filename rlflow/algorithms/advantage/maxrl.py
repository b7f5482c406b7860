"""Maximum-likelihood reinforcement learning (MaxRL 2026): rare successes count more."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, all_equal, centre, rewards_of, whole_episodes
from rlflow.errors import ConfigError


def maxrl(groups: Sequence[Group]) -> Advantages:
    """(r - mean) / mean of the group; exactly 0 if all rewards are equal.

    Raises ConfigError for a negative reward: then the mean is no rate of success.
    """
    return [whole_episodes(_relative(rewards_of(group))) for group in groups]


def _relative(rewards: Sequence[float]) -> list[float]:
    if rewards and min(rewards) < 0:
        raise ConfigError(
            f"algorithm.advantage=maxrl needs rewards of at least 0; got {min(rewards):g}; shift the reward, or "
            "take grpo"
        )
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [value / mean for value in centre(rewards)]
