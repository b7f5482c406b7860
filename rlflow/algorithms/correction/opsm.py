"""Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): no punishing of what the policy would not say."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.correction.base import log_ratios
from rlflow.algorithms.tokens import Tokens, sequence_mean, spread


@Traits(is_mask=True)
def opsm(tokens: Tokens, target: Tensor, *, delta: float = 0.5) -> Tensor:
    """0 where A < 0 and the sequence's mean of log(behaviour / target) exceeds `delta` nats, otherwise 1; [N]."""
    require_positive("delta", delta)
    drift = spread(sequence_mean(-log_ratios(tokens, target), tokens), tokens)
    return (~((tokens.advantages < 0) & (drift > delta))).to(target.dtype)
