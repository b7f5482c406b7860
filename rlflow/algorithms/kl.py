"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.loss.ppo_clip import MAX_LOG_RATIO


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy, [N]; never negative, unbiased on-policy (GRPO, arXiv:2402.03300).

    The gradient flows through `logprobs`.
    """
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
