"""Clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585): the weight is clipped, no token is dropped."""

from rlflow.algorithms.loss.base import TokenLoss, check_clips, clip_ratio, none_clipped, score
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio


def cispo(tokens: Tokens, *, clip_low: float | None = None, clip_high: float | None = 5.0) -> TokenLoss:
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log p with r = policy / proximal.

    A clip of None is no clip. Every token keeps a gradient, so `is_clipped` is False throughout.
    """
    check_clips(clip_low, clip_high)
    ratio = clamp_log_ratio(tokens.logprobs.detach() - tokens.proximal).exp()
    weights = clip_ratio(ratio, clip_low, clip_high) * tokens.advantages
    return TokenLoss(loss=score(weights, tokens.logprobs), is_clipped=none_clipped(tokens))
