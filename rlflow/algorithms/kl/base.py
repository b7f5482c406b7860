"""What every estimate of the KL is, and the coefficient that it is multiplied with in the loss."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlflow.algorithms.base import require, require_positive

_MAX_CHANGE = 0.2
"""How far one batch may push the coefficient, whatever its KL."""


class KlEstimate(Protocol):
    """Log-probabilities under the policy and the reference, [N] -> one estimate a token, [N], in nats.

    The gradient flows through the first.
    """

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor, /) -> Tensor: ...


def next_coefficient(coefficient: float, kl: float, target: float, steps: int, horizon: int) -> float:
    """The KL coefficient after a batch whose mean KL was `kl` (adaptive controller, arXiv:1909.08593).

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * steps / horizon); `steps` and `horizon` count the same thing,
    such as episodes: those of the batch, and those over which the coefficient may change by about 20 %.
    """
    require_positive("target", target)
    require(0 < steps <= horizon, "horizon", f"at least the steps of a batch, {steps}", horizon)
    error = min(max(kl / target - 1, -_MAX_CHANGE), _MAX_CHANGE)
    return coefficient * (1 + error * steps / horizon)
