"""The critic's loss, clipped around the values that the advantages were computed with (PPO, arXiv:1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import require
from rlflow.algorithms.loss.base import TokenLoss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> TokenLoss:
    """max((V - R)^2, (V' - R)^2) / 2 with V' = V clipped to within `clip` of the old value; all [N].

    None is no clip. The gradient flows through `values` only.
    """
    require(clip is None or clip > 0, "clip", "above 0, or null for no clip", clip)
    returns, old_values = returns.detach(), old_values.detach()
    plain = (values - returns).square()
    if clip is None:
        return TokenLoss(loss=plain / 2, is_clipped=torch.zeros_like(plain, dtype=torch.bool))
    near = torch.clamp(values, old_values - clip, old_values + clip)
    clipped = (near - returns).square()
    return TokenLoss(loss=torch.maximum(plain, clipped) / 2, is_clipped=clipped > plain)
