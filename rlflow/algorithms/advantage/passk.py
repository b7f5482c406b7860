"""The best of k alone (arXiv:2503.19595; grpo_passk in verl)."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, deviation, divide, rewards_of, whole_episodes


def passk(groups: Sequence[Group], *, normalise: bool = False) -> Advantages:
    """Best - second best reward for the best episode, 0 for the others; two best ones cancel out.

    With `normalise` divided by the deviation of the group, as in GRPO.
    """
    return [whole_episodes(_lead(rewards_of(group), normalise)) for group in groups]


def _lead(rewards: Sequence[float], normalise: bool) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    second, best = sorted(rewards)[-2:]
    leads = [best - second if reward == best else 0.0 for reward in rewards]
    return divide(leads, deviation(rewards)) if normalise else leads
