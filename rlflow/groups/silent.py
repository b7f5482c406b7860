"""Groups without a gradient, because no episode was better than another: which of them still go through the model."""

from collections.abc import Sequence

from rlflow.algorithms.registry import needs_critic
from rlflow.config import Config
from rlflow.types import ReadyGroup

SILENT_RUN = 8
"""One in so many groups without a gradient goes through the model, for the metrics."""


def has_no_gradient(config: Config, group: ReadyGroup) -> bool:
    """True if every token's loss is zero for any policy: no episode was better than another, and no other term."""
    algorithm = config.algorithm
    if needs_critic(algorithm) or config.teacher.models:
        return False
    values = (value for advantages in group.advantages if advantages is not None for value in advantages)
    bonus = algorithm.entropy_bonus or algorithm.entropy_target
    kl_coefficient = 0.0 if algorithm.kl_in_reward else algorithm.kl_coefficient
    return not any(values) and not any((kl_coefficient, bonus, algorithm.balance_coefficient))


def by_turns(silent: Sequence[ReadyGroup], num_before: int) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
    """The groups to observe, and those to pass over: the first of an update, which has had `num_before`, and every
    8th."""
    observed, passed_over = [], []
    for number, group in enumerate(silent, num_before):
        (passed_over if number % SILENT_RUN else observed).append(group)
    return observed, passed_over
