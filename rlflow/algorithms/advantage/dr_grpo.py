"""Group-relative advantage without the deviation (Dr. GRPO, arXiv:2503.20783)."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, centre, rewards_of, whole_episodes


def dr_grpo(groups: Sequence[Group]) -> Advantages:
    """r - mean of the group; exactly 0 if all rewards are equal. Belongs with `seq_mean_token_sum_norm`."""
    return [whole_episodes(centre(rewards_of(group))) for group in groups]
