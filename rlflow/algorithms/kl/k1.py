"""The plain log-ratio (k1, Schulman 2020)."""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, often negative. For rewards; as a loss its gradient is 0 on average."""
    return logprobs - reference_logprobs
