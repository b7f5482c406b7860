"""Half the squared log-ratio (k2, Schulman 2020)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.tokens import clamp_log_ratio


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, of low variance; on-policy its gradient is that of the KL."""
    return clamp_log_ratio(reference_logprobs - logprobs).square() / 2
