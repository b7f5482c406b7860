"""Truncated importance sampling by the geometric mean of a sequence (GSPO, arXiv:2507.18071)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_positive
from rlflow.algorithms.correction.base import geometric_ratios
from rlflow.algorithms.tokens import Tokens


def tis_geometric(tokens: Tokens, target: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(geometric mean over the sequence of target / behaviour, cap), [N]."""
    require_positive("cap", cap)
    return geometric_ratios(tokens, target).clamp(max=cap)
