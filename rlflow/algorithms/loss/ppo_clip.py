"""Clipped policy gradient (PPO, arXiv:1707.06347) with separate clips below and above (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import torch

from rlflow.algorithms.base import require
from rlflow.algorithms.loss.base import TokenLoss, check_clips, clipped_surrogate
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio


def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = policy / proximal.

    A clip of None is no clip. With a proximal policy equal to the current one the gradient is that of -A log p.
    `dual_clip` bounds the loss by -A dual_clip where A < 0, so that one token cannot dominate (arXiv:1912.09729; 3 is
    usual; INTELLECT-2's two-sided clip is dual_clip 4).
    """
    check_clips(clip_low, clip_high)
    require(dual_clip is None or dual_clip > 1, "dual_clip", "above 1, or null for none", dual_clip)
    ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal).exp()
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -tokens.advantages * dual_clip
        is_bounded = (tokens.advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
        is_clipped = is_clipped | is_bounded
    return TokenLoss(loss=loss, is_clipped=is_clipped)
