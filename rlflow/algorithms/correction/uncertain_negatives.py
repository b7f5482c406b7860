"""Negative-gradient clipping (QwenLong-L1.5, arXiv:2512.12967): what the policy is unsure of is not punished."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import Traits, require, require_positive
from rlflow.algorithms.tokens import Tokens, sequence_mean, spread


@Traits(is_mask=True)
def uncertain_negatives(tokens: Tokens, target: Tensor, *, threshold: float = 1.0, of: str = "token") -> Tensor:
    """0 where A < 0 and the entropy of the token, or with of=sequence its mean, exceeds `threshold` nats; [N].

    The paper does not give its threshold.
    """
    require_positive("threshold", threshold)
    require(of in ("token", "sequence"), "of", "one of token, sequence", of)
    entropies = tokens.entropies.detach()
    if of == "sequence":
        entropies = spread(sequence_mean(entropies, tokens), tokens)
    return (~((tokens.advantages < 0) & (entropies > threshold))).to(target.dtype)
