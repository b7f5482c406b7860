"""Truncated importance sampling: corrects for tokens that another policy sampled (V-trace, arXiv:1802.01561)."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.loss.ppo_clip import MAX_LOG_RATIO


def tis(proximal_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """min(proximal / behaviour, cap) of each token, [N]; a weight, so no gradient flows through it."""
    log_ratio = proximal_logprobs.detach() - behaviour_logprobs.detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
