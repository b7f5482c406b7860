"""The group's mean, the batch's deviation (Lite-PPO, arXiv:2508.08221)."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import (
    Advantages,
    Group,
    Scope,
    centre,
    deviation,
    divide,
    rewards_of,
    whole_episodes,
)
from rlflow.algorithms.base import Traits


@Traits(scope=Scope.batch)
def grpo_batch_std(groups: Sequence[Group]) -> Advantages:
    """(r - mean of the group) / (deviation of all rewards of the batch + 1e-6); exactly 0 where no reward differs."""
    scale = deviation([reward for group in groups for reward in rewards_of(group)])
    return [whole_episodes(divide(centre(rewards_of(group)), scale)) for group in groups]
