"""More groups than a step takes, and more episodes than a group takes: how many, and in which steps.

    short round: groups_per_step groups and spare ones; the slowest are cancelled -> their tasks are deferred
    long round: groups_per_step deferred tasks; nothing is spare, each is waited for

These are the rounds of RollPacker (arXiv:2509.21009, tail batching). A run in which rollout and training overlap has
none: there a group that is slow goes on, and ends when it is too old.

Rule: a task is deferred only if its group had the company of spare ones, and every deferred task comes again.
"""

import math

from rlflow.config import Config
from rlflow.groups.sampler import TaskSampler


def num_spare(wanted: int, oversample: float) -> int:
    """How many are started beyond those that are wanted.

    Example: num_spare(8, 1.25) == 2; num_spare(8, 1.01) == 1; num_spare(8, 1.0) == 0
    """
    return math.ceil(round(wanted * (oversample - 1), 6))  # 10 * (1.1 - 1) is a little more than 1


class Rounds:
    """What the intake asks about spare groups."""

    def __init__(self, config: Config) -> None:
        self._size = config.algorithm.groups_per_step
        self.most_spare = num_spare(self._size, config.rollout.oversample)
        self.ends_slow = self.most_spare > 0 and config.staleness.max_versions == 0
        """Whether the groups that a full step has not taken are cancelled."""
        self._step = -1
        self._is_long = False

    def begin(self, step: int, sampler: TaskSampler) -> None:
        """Groups for this step may start: decide what its round is, unless that was done before."""
        if self._step == step:
            return
        self._step = step
        # A run that resumes in a long round finds its tasks put back.
        self._is_long = self.ends_slow and max(sampler.num_deferred, sampler.num_put_back) >= self._size
        if self._is_long or not self.ends_slow:  # then a run before, with other settings, has deferred them
            sampler.recall(self._size)

    def spare_now(self, sampler: TaskSampler) -> int:
        """Spare groups that may exist now. A task that was put back is none of them, so that it is not late again."""
        return 0 if self._is_long or sampler.num_put_back else self.most_spare
