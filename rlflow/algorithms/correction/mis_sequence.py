"""Masked importance sampling of whole sequences: one that is too far off is left out."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import require_range
from rlflow.algorithms.correction.base import keep_within, sequence_ratios
from rlflow.algorithms.tokens import Tokens


def mis_sequence(tokens: Tokens, target: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """The product over the sequence of target / behaviour where it lies in [low, high], otherwise 0; [N]."""
    require_range(low, high)
    return keep_within(sequence_ratios(tokens, target), low, high)
