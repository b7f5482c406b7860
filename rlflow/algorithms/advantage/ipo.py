"""Identity preference optimisation (arXiv:2310.12036), which has an optimum at a finite margin."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scope
from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.preferences import pairwise


@Traits(scope=Scope.batch, needs_log_ratios=True)
def ipo(groups: Sequence[Group], *, beta: float = 0.1) -> Advantages:
    """(margin - 1 / (2 beta))^2, where the margin is between log(policy / reference) of the better and of the worse."""
    require_positive("beta", beta)
    return pairwise(groups, lambda margin: 2 * (margin - 1 / (2 * beta)))
