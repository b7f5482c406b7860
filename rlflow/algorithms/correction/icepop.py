"""IcePop (Ling Team 2025; used by INTELLECT-3): masked importance sampling with wide bounds."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_range
from rlflow.algorithms.correction.base import keep_within, token_ratios
from rlflow.algorithms.tokens import Tokens


def icepop(tokens: Tokens, target: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """target / behaviour of each token where it lies in [low, high], otherwise 0; [N]."""
    require_range(low, high)
    return keep_within(token_ratios(tokens, target), low, high)
