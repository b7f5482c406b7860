"""Group-relative advantage (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_EPSILON = 1e-6


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) over the rewards [G] of one group -> [G].

    std is that of a sample (divisor G - 1), as in TRL and verl. A group in which no episode is better than
    another, one with a single episode included, says nothing about what to do: its advantages are exactly 0.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    deviation = statistics.stdev(rewards, mean)
    return [(reward - mean) / (deviation + _EPSILON) for reward in rewards]
