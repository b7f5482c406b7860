"""Truncated importance sampling of whole sequences (V-trace, arXiv:1802.01561)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_positive
from rlflow.algorithms.correction.base import sequence_ratios
from rlflow.algorithms.tokens import Tokens


def tis_sequence(tokens: Tokens, target: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(product over the sequence of target / behaviour, cap), [N]; without bias below the cap, of high variance."""
    require_positive("cap", cap)
    return sequence_ratios(tokens, target).clamp(max=cap)
