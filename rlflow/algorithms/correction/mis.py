"""Masked importance sampling of tokens: a token that is too far off is left out."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_range
from rlflow.algorithms.correction.base import keep_within, token_ratios
from rlflow.algorithms.tokens import Tokens


def mis(tokens: Tokens, target: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """target / behaviour of each token where it lies in [low, high], otherwise 0; [N]."""
    require_range(low, high)
    return keep_within(token_ratios(tokens, target), low, high)
