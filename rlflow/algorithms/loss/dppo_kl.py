"""Divergence proximal policy optimisation by Kullback-Leibler divergence (DPPO, arXiv:2602.04879)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.loss.base import TokenLoss, behaviour_ratio, score
from rlflow.algorithms.tokens import Tokens

_SMALLEST = 1e-12
"""Stands for a probability of 0, whose logarithm is not a number to compute with."""


@Traits(is_corrected=True)
def dppo_kl(tokens: Tokens, *, threshold: float = 0.05, cap: float = 20.0) -> TokenLoss:
    """-stop_gradient(min(policy / behaviour, cap)) A log p, for tokens whose distribution has not moved too far.

    No gradient where KL(behaviour || policy), in nats, of "this token or another" exceeds `threshold` and the step
    would go further: A > 0 and the token has become likelier, or A < 0 and less likely. Both compare with the policy
    that sampled the token, so a correction on top would count the ratio twice.
    """
    require_positive("threshold", threshold)
    require_positive("cap", cap)
    difference = tokens.logprobs.detach() - tokens.behaviour
    goes_further = difference * tokens.advantages > 0
    is_clipped = goes_further & (_binary_kl(tokens.behaviour, tokens.logprobs.detach()) > threshold)
    weights = behaviour_ratio(tokens, cap) * tokens.advantages * ~is_clipped
    return TokenLoss(loss=score(weights, tokens.logprobs), is_clipped=is_clipped)


def _binary_kl(behaviour: Tensor, logprobs: Tensor) -> Tensor:
    """KL [N] between two coins that show "this token" with the given log-probabilities; in float64."""
    behaviour, logprobs = behaviour.double(), logprobs.double()
    others = -torch.expm1(behaviour)
    log_others = others.clamp(min=_SMALLEST).log() - (-torch.expm1(logprobs)).clamp(min=_SMALLEST).log()
    return behaviour.exp() * (behaviour - logprobs) + others * log_others
