"""Entropy kept in a band by leaving out negative samples (AEPO, QwenLong-L1.5, arXiv:2512.12967).

Positive samples alone make a policy surer of itself, so its entropy falls; negative ones make it rise. Entropies are
over the full vocabulary, in nats.
"""

from torch import Tensor

from rlflow.algorithms.base import require
from rlflow.algorithms.tokens import Tokens


def leaves_out_negatives(did_before: bool, entropy: float, *, low: float, high: float) -> bool:
    """Whether the next step leaves out all tokens with negative advantage.

    `entropy` is the mean over sequences of each one's mean. From the step in which it exceeds `high` until one in which
    it is below `low`; in between it stays as it was. The paper gives no bounds; the entropy in its plots moves from
    about 0.1 to 0.3.
    """
    require(0 <= low < high, "entropy low", f"at least 0 and below high, {high:g}", low)
    if entropy > high:
        return True
    return did_before and entropy >= low


def without_negatives(tokens: Tokens) -> Tensor:
    """0 for tokens with negative advantage, otherwise 1; [N]."""
    return (tokens.advantages >= 0).to(tokens.advantages.dtype)
