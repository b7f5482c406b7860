"""What every correction is, and the ratios that several of them take."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from rlflow.algorithms.tokens import Tokens, clamp_log_ratio, sequence_mean, sequence_sum, spread

CorrectionFunction: TypeAlias = Callable[[Tokens, Tensor], Tensor]
"""A correction with its options bound: tokens, target -> the weight of each token's loss [N]; 0 rejects the token.

`target` [N] holds the log-probabilities of the policy that the loss believes has sampled the tokens: the proximal one,
or the current one. No gradient flows through the weights.
"""


def log_ratios(tokens: Tokens, target: Tensor) -> Tensor:
    """log(target / behaviour) of each token, [N], without gradient."""
    return target.detach() - tokens.behaviour.detach()


def token_ratios(tokens: Tokens, target: Tensor) -> Tensor:
    return clamp_log_ratio(log_ratios(tokens, target)).exp()


def sequence_ratios(tokens: Tokens, target: Tensor) -> Tensor:
    """The product of target / behaviour over the sequence, for each of its tokens [N]."""
    return spread(clamp_log_ratio(sequence_sum(log_ratios(tokens, target), tokens)).exp(), tokens)


def geometric_ratios(tokens: Tokens, target: Tensor) -> Tensor:
    """The geometric mean of target / behaviour over the sequence, for each of its tokens [N]."""
    return spread(clamp_log_ratio(sequence_mean(log_ratios(tokens, target), tokens)).exp(), tokens)


def keep_within(ratios: Tensor, low: float, high: float) -> Tensor:
    """The ratio where it lies in [low, high], 0 elsewhere."""
    return ratios * is_within(ratios, low, high)


def is_within(ratios: Tensor, low: float, high: float) -> Tensor:
    return (ratios >= low) & (ratios <= high)
