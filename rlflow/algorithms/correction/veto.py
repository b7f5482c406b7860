"""Rejection of sequences that hold a token which the target policy all but rules out."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import Traits, require
from rlflow.algorithms.correction.base import token_ratios
from rlflow.algorithms.tokens import Tokens, sequence_sum, spread


@Traits(is_mask=True)
def veto(tokens: Tokens, target: Tensor, *, low: float = 1e-4) -> Tensor:
    """0 for every token of a sequence in which target / behaviour of any token is below `low`, otherwise 1; [N]."""
    require(0 < low < 1, "low", "between 0 and 1", low)
    is_excluded = (token_ratios(tokens, target) < low).to(target.dtype)
    return (spread(sequence_sum(is_excluded, tokens), tokens) == 0).to(target.dtype)
