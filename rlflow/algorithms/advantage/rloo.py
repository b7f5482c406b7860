"""Leave-one-out baseline (RLOO, arXiv:2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, centre, rewards_of, whole_episodes


def rloo(groups: Sequence[Group]) -> Advantages:
    """r - mean of the others' rewards = G / (G - 1) (r - mean of the group); exactly 0 where no reward differs."""
    return [
        whole_episodes([value * len(group) / max(len(group) - 1, 1) for value in centre(rewards_of(group))])
        for group in groups
    ]
