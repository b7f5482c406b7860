"""Entropy that is kept up by a bonus, or in a band by leaving out negative samples.

Entropies are over the whole vocabulary, in nats.
"""

from torch import Tensor

from rlflow.algorithms.base import require, require_positive
from rlflow.algorithms.tokens import Tokens

BONUS_STEP, MOST_BONUS = 0.005, 1.0
"""What a step changes the bonus by (Skywork-OR1, arXiv:2505.22312), and where it stops growing."""


def next_bonus(bonus: float, entropy: float, target: float) -> tuple[float, bool]:
    """The bonus after a step whose mean entropy of a token was `entropy`, and whether the next step gives it.

    It grows by BONUS_STEP while the entropy is at most the target, falls by as much above, and is given in the first
    case only (adaptive entropy control, arXiv:2505.22312).

    Example: next_bonus(0.01, entropy=0.1, target=0.2) == (0.015, True); with entropy=0.3 it is (0.005, False)
    """
    require_positive("entropy target", target)
    if entropy <= target:
        return min(bonus + BONUS_STEP, MOST_BONUS), True
    return max(bonus - BONUS_STEP, 0.0), False


def leaves_out_negatives(did_before: bool, entropy: float, *, low: float, high: float) -> bool:
    """Whether the next step leaves out all tokens with negative advantage (AEPO, QwenLong-L1.5, arXiv:2512.12967).

    Positive samples alone make a policy surer of itself, so its entropy falls; negative ones make it rise.

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
