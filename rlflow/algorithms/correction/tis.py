"""Truncated importance sampling of tokens (V-trace, arXiv:1802.01561)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_positive
from rlflow.algorithms.correction.base import token_ratios
from rlflow.algorithms.tokens import Tokens


def tis(tokens: Tokens, target: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(target / behaviour, cap) of each token, [N]."""
    require_positive("cap", cap)
    return token_ratios(tokens, target).clamp(max=cap)
