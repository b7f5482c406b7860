"""Divergence proximal policy optimisation by total variation (DPPO, arXiv:2602.04879)."""

from __future__ import annotations

from rlflow.algorithms.base import Traits, require, require_positive
from rlflow.algorithms.loss.base import TokenLoss, behaviour_ratio, score
from rlflow.algorithms.tokens import Tokens


@Traits(is_corrected=True)
def dppo_tv(tokens: Tokens, *, clip_low: float = 0.15, clip_high: float = 0.15, cap: float = 20.0) -> TokenLoss:
    """-stop_gradient(min(policy / behaviour, cap)) A log p, for tokens whose probability has not moved too far.

    No gradient where A > 0 and the probability of the token has risen by more than `clip_high`, or where A < 0 and it
    has fallen by more than `clip_low`: differences of probabilities, where PPO takes their ratio. Both compare with
    the policy that sampled the token, so a correction on top would count the ratio twice.
    """
    for option, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        require(0 < value <= 1, option, "above 0 and at most 1", value)
    require_positive("cap", cap)
    difference = tokens.logprobs.detach().exp() - tokens.behaviour.exp()
    rises = (tokens.advantages > 0) & (difference > clip_high)
    falls = (tokens.advantages < 0) & (difference < -clip_low)
    is_clipped = rises | falls
    weights = behaviour_ratio(tokens, cap) * tokens.advantages * ~is_clipped
    return TokenLoss(loss=score(weights, tokens.logprobs), is_clipped=is_clipped)
