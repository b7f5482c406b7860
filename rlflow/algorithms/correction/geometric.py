"""Rejection of sequences by the geometric mean of their ratios."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import Traits, require_range
from rlflow.algorithms.correction.base import geometric_ratios, is_within
from rlflow.algorithms.tokens import Tokens


@Traits(is_mask=True)
def geometric(tokens: Tokens, target: Tensor, *, low: float = 0.999, high: float = 1.001) -> Tensor:
    """1 where the geometric mean over the sequence of target / behaviour lies in [low, high], otherwise 0; [N].

    The mean does not grow with the length of the sequence, so one pair of bounds serves short and long ones.
    """
    require_range(low, high)
    return is_within(geometric_ratios(tokens, target), low, high).to(target.dtype)
