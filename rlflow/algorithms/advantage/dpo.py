"""Direct preference optimisation (arXiv:2305.18290)."""

import math
from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scope
from rlflow.algorithms.base import Traits, require, require_positive
from rlflow.algorithms.preferences import pairwise


@Traits(scope=Scope.batch, needs_log_ratios=True)
def dpo(groups: Sequence[Group], *, beta: float = 0.1, label_smoothing: float = 0.0) -> Advantages:
    """-log sigmoid(beta * margin), where the margin is between log(policy / reference) of the better and of the worse.

    `label_smoothing` is the share of pairs that are taken to be the wrong way round (conservative DPO).
    """
    require_positive("beta", beta)
    require(0 <= label_smoothing < 0.5, "label_smoothing", "from 0 to below 0.5", label_smoothing)
    return pairwise(groups, lambda margin: -beta * (_sigmoid(-beta * margin) - label_smoothing))


def _sigmoid(value: float) -> float:
    return 0.5 * (1 + math.tanh(value / 2))
