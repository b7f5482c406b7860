"""The reward itself: no baseline (REINFORCE, Williams 1992); of demonstrations, their weight."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group
from rlflow.algorithms.base import Traits


@Traits(compares=False)
def reward(groups: Sequence[Group]) -> Advantages:
    """r, of each episode alone."""
    return [[[episode.reward] for episode in group] for group in groups]
