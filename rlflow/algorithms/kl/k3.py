"""The log-ratio with a control variate (k3, Schulman 2020; GRPO, arXiv:2402.03300)."""

from torch import Tensor

from rlflow.algorithms.tokens import clamp_log_ratio

MAX_ESTIMATE = 10.0
"""Nats that a token counts at most, as in verl: beyond it a few tokens would be the whole gradient."""


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy), at most 10: never negative, unbiased on-policy below that."""
    difference = clamp_log_ratio(reference_logprobs - logprobs)
    return (difference.exp() - difference - 1).clamp(max=MAX_ESTIMATE)
