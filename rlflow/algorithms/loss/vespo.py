"""Variational sequence-level soft policy optimisation (VESPO, arXiv:2602.10693): a smooth weight of whole sequences."""

import math

import torch

from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.loss.base import TokenLoss, none_clipped, score
from rlflow.algorithms.tokens import MAX_LOG_RATIO, Tokens, clamp_log_ratio, sequence_sum, spread

_SMALLEST = math.log(1e-8)


@Traits(is_corrected=True)
def vespo(
    tokens: Tokens,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> TokenLoss:
    """-stop_gradient(w^power exp(decay (1 - w))) A log p, with w the product of policy / behaviour over the sequence.

    `power` and `decay` go by the sign of A. The weight is 1 at w = 1, highest at w = power / decay, and fades on both
    sides. The ratio is against the policy that sampled, so a correction on top would count it twice. Every token keeps
    a gradient, so `is_clipped` is False throughout.
    """
    powers, decays = (power_positive, power_negative), (decay_positive, decay_negative)
    for sign, power, decay in zip(("positive", "negative"), powers, decays, strict=True):
        require_positive(f"power_{sign}", power)
        require_positive(f"decay_{sign}", decay)
    of_sequence = sequence_sum(clamp_log_ratio(tokens.logprobs.detach() - tokens.behaviour), tokens)
    log_ratio = spread(of_sequence.clamp(_SMALLEST, MAX_LOG_RATIO), tokens)
    is_positive = tokens.advantages >= 0
    power, decay = (torch.where(is_positive, *map(log_ratio.new_tensor, pair)) for pair in (powers, decays))
    weights = (power * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return TokenLoss(loss=score(weights * tokens.advantages, tokens.logprobs), is_clipped=none_clipped(tokens))
