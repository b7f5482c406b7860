"""Who may start and who is too old: pure functions of counts and versions.

Who goes first is `ready.py`.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.config import Late
from rlflow.types import ReadyGroup, Sample


def admission_budget(
    *, served_step: int, num_steps: int, groups_per_step: int, max_versions: int, num_trained: int, num_live: int
) -> int:
    """How many groups may start now.

    The engines hold the version that step `served_step` (counted from 0) updates: groups for it and for the
    `max_versions` steps after it may exist; a group that is dropped gives its place back. AReaL (2505.24298, section
    4.1) bounds the same sum, there without drops.
    """
    last_step = min(served_step + 1 + max_versions, num_steps)
    return max(0, last_step * groups_per_step - num_trained - num_live)


def oldest_allowed(*, version: int, max_versions: int) -> int:
    """The oldest version whose tokens an update of `version` may use."""
    return version - max_versions


def is_too_late(group: ReadyGroup, *, oldest: int, late: Late) -> bool:
    """Whether an update that allows tokens of version `oldest` and newer must do without the group."""
    if late is Late.train:
        return False
    if late is Late.mask:
        return group.newest_version < oldest
    return group.oldest_version < oldest


def without_old_tokens(sample: Sample, oldest: int) -> Sample:
    """The sample with the tokens sampled before version `oldest` taken out of the loss; they stay as context."""
    return replace(sample, loss_mask=sample.loss_mask & (sample.versions >= oldest))
