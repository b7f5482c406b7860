"""The value of one estimate with the gradient of another (k3 and k2, Schulman 2020)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.kl.k2 import k2
from rlflow.algorithms.kl.k3 import k3


def k3_straight_through(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: the unbiased estimate with, on-policy, the right gradient."""
    squared = k2(logprobs, reference_logprobs)
    return k3(logprobs, reference_logprobs).detach() + squared - squared.detach()
