"""Maximum-likelihood reinforcement learning (MaxRL 2026): rare successes count more."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, all_equal, centre, rewards_of, whole_episodes
from rlflow.errors import ConfigError


def maxrl(groups: Sequence[Group]) -> Advantages:
    """(r - mean) / mean of the group; exactly 0 if all rewards are equal.

    Raises ConfigError for a negative reward: then the mean is no rate of success.
    """
    advantages: Advantages = []
    for group in groups:
        rewards = rewards_of(group)
        if rewards and min(rewards) < 0:
            raise ConfigError(
                f"algorithm.advantage=maxrl needs rewards of at least 0; got {min(rewards):g}; shift the reward, or "
                "take grpo"
            )
        mean = 1.0 if all_equal(rewards) else sum(rewards) / len(rewards)
        advantages.append(whole_episodes([value / mean for value in centre(rewards)]))
    return advantages
