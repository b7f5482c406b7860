"""The group's mean, the deviation of all tasks of the same kind (QwenLong-L1.5, arXiv:2512.12967)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rlflow.algorithms.advantage.base import EPSILON, Advantages, Group, Scope, centre, deviation, rewards_of
from rlflow.algorithms.base import Traits


@Traits(scope=Scope.batch)
def grpo_task_std(groups: Sequence[Group]) -> Advantages:
    """(r - mean of the group) / (deviation of the batch's rewards of the same `task_kind` + 1e-6)."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for episode in group:
            by_kind[episode.task_kind].append(episode.reward)
    scales = {kind: deviation(rewards) for kind, rewards in by_kind.items()}
    return [_scaled(group, scales) for group in groups]


def _scaled(group: Group, scales: dict[str, float]) -> list[list[float]]:
    values = zip(group, centre(rewards_of(group)), strict=True)
    return [[value / (scales[episode.task_kind] + EPSILON)] for episode, value in values]
