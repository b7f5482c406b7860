"""Geometric-mean policy optimisation (GMPO, arXiv:2507.20673): clipped a token, averaged geometrically."""

from __future__ import annotations

import torch

from rlflow.algorithms.base import require_positive
from rlflow.algorithms.loss.base import TokenLoss
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio, sequence_mean, spread


def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """-A exp(mean over the sequence of c), c = log(policy / proximal) clipped where the step would go further.

    c is at most `clip_high` where A > 0 and at least -`clip_low` where A < 0; both are log-ratios. Each token has the
    loss of its sequence, and the gradient through its own log-probability alone: averaged over the tokens of a sequence
    (`seq_mean_token_mean`) value and gradient are the paper's. Other aggregations weigh sequences by their length.
    """
    require_positive("clip_low", clip_low)
    require_positive("clip_high", clip_high)
    log_ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal)
    is_clipped = torch.where(
        tokens.advantages > 0, log_ratio > clip_high, (tokens.advantages < 0) & (log_ratio < -clip_low)
    )
    clipped = torch.where(is_clipped, log_ratio.clamp(-clip_low, clip_high).detach(), log_ratio)
    sequence_ratio = spread(sequence_mean(clipped.detach(), tokens), tokens).exp()
    ratio = sequence_ratio * (clipped - clipped.detach()).exp()
    return TokenLoss(loss=-tokens.advantages * ratio, is_clipped=is_clipped)
