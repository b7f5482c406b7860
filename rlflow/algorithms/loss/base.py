"""What every policy loss returns, and what several of them do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlflow.algorithms.base import require
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio


class TokenLoss(NamedTuple):
    loss: Tensor
    """[N], to be minimised."""
    is_clipped: Tensor
    """[N] bool, True where the loss took the gradient away."""


class PolicyLoss(Protocol):
    """A loss with its options bound."""

    def __call__(self, tokens: Tokens, /) -> TokenLoss: ...


def check_clips(clip_low: float | None, clip_high: float | None) -> None:
    """The clips of a ratio, to [1 - clip_low, 1 + clip_high]; None is no clip."""
    require(clip_low is None or 0 < clip_low <= 1, "clip_low", "above 0 and at most 1, or null for no clip", clip_low)
    require(clip_high is None or clip_high > 0, "clip_high", "above 0, or null for no clip", clip_high)


def clip_ratio(ratio: Tensor, clip_low: float | None, clip_high: float | None) -> Tensor:
    lowest = 0.0 if clip_low is None else 1 - clip_low
    highest = torch.inf if clip_high is None else 1 + clip_high
    return ratio.clamp(lowest, highest)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float | None, clip_high: float | None
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clip won; all [N]."""
    unclipped = -advantages * ratio
    clipped = -advantages * clip_ratio(ratio, clip_low, clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def score(weights: Tensor, logprobs: Tensor) -> Tensor:
    """-weights * log p [N], with no gradient through the weights."""
    return -weights.detach() * logprobs


def behaviour_ratio(tokens: Tokens, cap: float) -> Tensor:
    """min(policy / behaviour, cap) [N], without gradient."""
    return clamp_log_ratio(tokens.logprobs.detach() - tokens.behaviour).exp().clamp(max=cap)


def none_clipped(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.advantages, dtype=torch.bool)
