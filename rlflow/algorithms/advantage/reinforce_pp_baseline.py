"""REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scope, all_equal, centre, rewards_of, whole_episodes
from rlflow.algorithms.base import Traits
from rlflow.algorithms.token_advantage.gae import Moments, whiten_value


@Traits(scope=Scope.batch)
def reinforce_pp_baseline(groups: Sequence[Group]) -> Advantages:
    """r - mean of the group, whitened over all loss tokens of the batch.

    A group in which no reward differs counts in the statistics and stays at exactly 0: whitening would move it by the
    batch's mean, which says nothing about it.
    """
    centred = [centre(rewards_of(group)) for group in groups]
    lengths = [episode.num_loss_tokens for group in groups for episode in group]
    moments = Moments.of([value for group in centred for value in group], lengths)
    return [
        whole_episodes(group if all_equal(group) else [whiten_value(value, moments) for value in group])
        for group in centred
    ]
