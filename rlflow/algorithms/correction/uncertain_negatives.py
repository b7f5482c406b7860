"""Negative-gradient clipping (QwenLong-L1.5, arXiv:2512.12967): what the policy is unsure of is not punished."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import Traits, require
from rlflow.algorithms.entropy import EntropyOf, without_uncertain_negatives
from rlflow.algorithms.tokens import Tokens


@Traits(is_mask=True)
def uncertain_negatives(tokens: Tokens, target: Tensor, *, threshold: float = 1.0, of: str = "token") -> Tensor:
    """0 where A < 0 and the entropy of the token, or with of=sequence its mean, exceeds `threshold` nats; [N].

    The paper does not give its threshold.
    """
    require(of in tuple(EntropyOf), "of", f"one of {', '.join(EntropyOf)}", of)
    return without_uncertain_negatives(tokens, threshold=threshold, of=EntropyOf(of)).to(target.dtype)
