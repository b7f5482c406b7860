"""Efficiency-aware advantage of rounds (EAPO, IterResearch, arXiv:2511.07327): early turns of short episodes win."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, require_turns, standardise
from rlflow.algorithms.base import Traits, require


@Traits(is_per_turn=True)
def eapo(groups: Sequence[Group], *, discount: float = 0.95) -> Advantages:
    """(discount^(T - t) R - mean) / (deviation + 1e-6) for turn t of T, over all turns of all episodes of the group.

    R is the episode's reward; rewards of turns are not read. Equal rewards are not 0 here, unless they are 0: an
    episode with fewer turns is better. The paper does not give its discount. Raises ConfigError for an episode without
    turns.
    """
    require(0 < discount <= 1, "discount", "above 0 and at most 1", discount)
    require_turns("eapo", groups)
    return [_over_turns(group, discount) for group in groups]


def _over_turns(group: Group, discount: float) -> list[list[float]]:
    returns = [
        episode.reward * discount ** (len(episode.turns) - turn)
        for episode in group
        for turn in range(1, len(episode.turns) + 1)
    ]
    values = iter(standardise(returns))
    return [[next(values) for _ in episode.turns] for episode in group]
