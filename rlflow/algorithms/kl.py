"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens, in nats (Schulman 2020).

Each takes the log-probabilities under the policy and under the reference, [N], and returns one estimate a token, [N];
the gradient flows through the first.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlflow.algorithms.options import require, require_positive
from rlflow.algorithms.tokens import clamp_log_ratio

_MAX_CHANGE = 0.2
"""How far one batch may push the coefficient, whatever its KL."""


class KlEstimate(Protocol):
    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor, /) -> Tensor: ...


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, often negative. For rewards; as a loss its gradient is 0 on average."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, of low variance; on-policy its gradient is that of the KL."""
    return clamp_log_ratio(reference_logprobs - logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy): never negative, unbiased on-policy (GRPO, arXiv:2402.03300)."""
    difference = clamp_log_ratio(reference_logprobs - logprobs)
    return difference.exp() - difference - 1


def k3_straight_through(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: the unbiased estimate with, on-policy, the right gradient."""
    squared = k2(logprobs, reference_logprobs)
    return k3(logprobs, reference_logprobs).detach() + squared - squared.detach()


def next_coefficient(coefficient: float, kl: float, target: float, steps: int, horizon: int) -> float:
    """The KL coefficient after a batch whose mean KL was `kl` (adaptive controller, arXiv:1909.08593).

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * steps / horizon); `steps` and `horizon` count the same thing,
    such as episodes: those of the batch, and those over which the coefficient may change by about 20 %.
    """
    require_positive("target", target)
    require(0 < steps <= horizon, "horizon", f"at least the steps of a batch, {steps}", horizon)
    error = min(max(kl / target - 1, -_MAX_CHANGE), _MAX_CHANGE)
    return coefficient * (1 + error * steps / horizon)
