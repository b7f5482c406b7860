"""Clipped policy gradient (PPO, arXiv:1707.06347) with separate clips below and above (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond it a probability ratio is not a number to compute with; the gradient there is 0."""


class TokenLoss(NamedTuple):
    loss: Tensor
    """[N], to be minimised."""
    is_clipped: Tensor
    """[N], True where the clip took the gradient away."""


def ppo_clip(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, clip_low: float | None, clip_high: float | None
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - proximal_logprobs), all [N].

    A clip of None is no clip. With `proximal_logprobs` equal to `logprobs` the gradient is that of -A log p.
    """
    ratio = (logprobs - proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    highest = torch.inf if clip_high is None else 1 + clip_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    return TokenLoss(loss=torch.maximum(unclipped, clipped), is_clipped=clipped > unclipped)
