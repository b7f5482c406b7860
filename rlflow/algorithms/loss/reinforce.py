"""Plain policy gradient (REINFORCE, Williams 1992; as GPG, arXiv:2504.02546)."""

from __future__ import annotations

from rlflow.algorithms.base import Traits
from rlflow.algorithms.loss.base import TokenLoss, none_clipped, score
from rlflow.algorithms.tokens import Tokens


@Traits(has_no_ratio=True)
def reinforce(tokens: Tokens) -> TokenLoss:
    """-A log p. No ratio and no clip: right for tokens of the current policy, or with a correction."""
    return TokenLoss(loss=score(tokens.advantages, tokens.logprobs), is_clipped=none_clipped(tokens))
