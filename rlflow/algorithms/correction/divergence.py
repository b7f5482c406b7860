"""Rejection of tokens or sequences by an estimate of how far the target policy is from the one that sampled."""

import torch
from torch import Tensor

from rlflow.algorithms.base import Traits, require, require_positive
from rlflow.algorithms.correction.base import log_ratios
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio, sequence_mean, sequence_sum, spread

_ESTIMATES = ("k2", "k3")
_LEVELS = ("token", "mean", "sum", "max")


@Traits(is_mask=True)
def divergence(
    tokens: Tokens, target: Tensor, *, threshold: float = 0.05, of: str = "mean", estimate: str = "k3"
) -> Tensor:
    """1 where KL(behaviour || target), in nats, is at most `threshold`, otherwise 0; [N].

    With d = log(target / behaviour), `estimate` k3 is exp(d) - d - 1 and k2 is d^2 / 2 (Schulman 2020). `of` says what
    is compared: each `token` by itself, or the `mean`, `sum` or `max` over its sequence.
    """
    require_positive("threshold", threshold)
    require(of in _LEVELS, "of", f"one of {', '.join(_LEVELS)}", of)
    require(estimate in _ESTIMATES, "estimate", f"one of {', '.join(_ESTIMATES)}", estimate)
    ratio = clamp_log_ratio(log_ratios(tokens, target))
    values = ratio.exp() - 1 - ratio if estimate == "k3" else ratio.square() / 2
    if of == "max":
        largest = torch.zeros(tokens.num_sequences, dtype=values.dtype, device=values.device)
        values = spread(largest.scatter_reduce(0, tokens.sequence_of, values, "amax"), tokens)
    elif of != "token":
        values = spread((sequence_sum if of == "sum" else sequence_mean)(values, tokens), tokens)
    return (values <= threshold).to(target.dtype)
