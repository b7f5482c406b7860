"""Group-relative advantage (GRPO, arXiv:2402.03300)."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, rewards_of, standardise, whole_episodes


def grpo(groups: Sequence[Group]) -> Advantages:
    """(r - mean) / (deviation + 1e-6) over the rewards of a group.

    The deviation is that of a sample (divisor G - 1), as in TRL and verl. A group in which no episode is better than
    another, one with a single episode included, says nothing about what to do: its advantages are exactly 0.
    """
    return [whole_episodes(standardise(rewards_of(group))) for group in groups]
