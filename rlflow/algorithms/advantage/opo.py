"""On-policy optimal baseline (OPO, arXiv:2505.23585)."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, all_equal, rewards_of, whole_episodes


def opo(groups: Sequence[Group]) -> Advantages:
    """r - sum(length r) / sum(length), lengths in loss tokens; exactly 0 if all rewards of the group are equal."""
    return [whole_episodes(_from_optimal_baseline(group)) for group in groups]


def _from_optimal_baseline(group: Group) -> list[float]:
    if all_equal(rewards_of(group)):
        return [0.0] * len(group)
    num_tokens = sum(episode.num_loss_tokens for episode in group)
    assert num_tokens > 0, "an episode without loss tokens is not trained on"
    baseline = sum(episode.num_loss_tokens * episode.reward for episode in group) / num_tokens
    return [episode.reward - baseline for episode in group]
