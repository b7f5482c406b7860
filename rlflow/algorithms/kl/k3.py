"""The log-ratio with a control variate (k3, Schulman 2020; GRPO, arXiv:2402.03300)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.tokens import clamp_log_ratio


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy): never negative, unbiased on-policy (GRPO, arXiv:2402.03300)."""
    difference = clamp_log_ratio(reference_logprobs - logprobs)
    return difference.exp() - difference - 1
