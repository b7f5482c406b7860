"""How the losses of tokens become the loss of a step.

loss [N] -> times weights [N], summed over all rows and ranks -> divided once by a count of the whole step, if any
"""

from enum import StrEnum

import torch
from torch import Tensor

from rlflow.algorithms.base import require
from rlflow.algorithms.tokens import Tokens, spread
from rlflow.config import Aggregation


class Denominator(StrEnum):
    """What is counted over the whole step, on all ranks, to divide by."""

    tokens = "tokens"
    sequences = "sequences"
    nothing = "nothing"
    """The step is not divided."""


def denominator(aggregation: Aggregation) -> Denominator:
    if aggregation is Aggregation.token_sum:
        return Denominator.nothing
    return Denominator.tokens if aggregation is Aggregation.token_mean else Denominator.sequences


def token_weights(aggregation: Aggregation, tokens: Tokens, max_length: int) -> Tensor:
    """What each token's loss counts, [N], before the division by the denominator.

    `max_length` is the largest number of loss tokens that a sequence can have; only seq_mean_token_sum_norm reads it.
    """
    ones = torch.ones_like(tokens.advantages)
    match aggregation:
        case Aggregation.token_mean | Aggregation.seq_mean_token_sum | Aggregation.token_sum:
            return ones
        case Aggregation.seq_mean_token_mean:
            return ones / spread(tokens.lengths, tokens)
        case Aggregation.seq_mean_token_sum_norm:
            require(max_length > 0, "max_length", "1 or more", max_length)
            return ones / max_length
