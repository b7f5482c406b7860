"""Asynchronous importance-weighted policy optimisation (AIPO, LlamaRL, arXiv:2505.24034)."""

from __future__ import annotations

from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.loss.base import TokenLoss, behaviour_ratio, none_clipped, score
from rlflow.algorithms.tokens import Tokens


@Traits(is_corrected=True)
def aipo(tokens: Tokens, *, cap: float = 2.0) -> TokenLoss:
    """-stop_gradient(min(policy / behaviour, cap)) A log p.

    The ratio is against the policy that sampled the token, so a correction on top would count it twice. The paper
    suggests a cap from 2 to 10. Every token keeps a gradient, so `is_clipped` is False throughout.
    """
    require_positive("cap", cap)
    weights = behaviour_ratio(tokens, cap) * tokens.advantages
    return TokenLoss(loss=score(weights, tokens.logprobs), is_clipped=none_clipped(tokens))
