"""Which groups may start and which are too old: pure functions of counts and versions.

    counts -> admission_budget, next_target -> how many groups start
    versions -> is_too_late -> trained or dropped

Rule: an update of version v uses no token older than version v - staleness.max_versions, unless staleness.late=train
asks for it. A token is as old as the oldest weights that had a part in it: those that sampled it, or that computed its
context. The budget starts no more groups than there are places in the updates that may use
them; `ready.py` decides which ready group goes first; `is_too_late` is the last gate.
"""

from dataclasses import replace

from rlflow.config import Late
from rlflow.types import NO_VERSION, ReadyGroup, Sample

WAITED = 0.05
"""Share of a step that the trainer may wait for groups before more of them are started."""
CROWDED = 0.5
"""Share of the parts of replies that came from engines without room, above which more groups would only wait there."""


def admission_budget(
    *,
    served_step: int,
    num_steps: int,
    groups_per_step: int,
    max_versions: int,
    num_trained: int,
    num_live: int,
    num_training: int = 0,
    num_spare: int = 0,
) -> int:
    """How many groups may start now.

    The engines hold the version that step `served_step` (counted from 0) updates. Groups for that step and for the
    `max_versions` steps after it may exist; a group that is dropped gives its place back. AReaL (arXiv:2505.24298,
    section 4.1) bounds the same sum, without drops. `num_spare` groups more may exist while these steps have places
    that the trainer has not filled; `num_training` of the live groups fill one.

    Example: served_step 0, 4 groups a step, max_versions 1, nothing trained, 3 live -> 2 * 4 - 3 = 5 may start
    """
    places = min(served_step + 1 + max_versions, num_steps) * groups_per_step - num_trained
    return max(0, places + (num_spare if places > num_training else 0) - num_live)


def next_target(
    target: int,
    *,
    waited_share: float,
    num_ready: int,
    crowded_share: float,
    groups_per_step: int,
    max_versions: int,
) -> int:
    """How many groups should be live in the next step, within the bound.

    More if the trainer waited for groups in the last step, unless the engines had no room for those that there were;
    fewer if a whole step's groups are ready already, because they would only grow old. So tokens are as fresh as the
    trainer's speed permits; only slow groups meet the bound.
    """
    most = (1 + max_versions) * groups_per_step
    if waited_share > WAITED:
        if crowded_share > CROWDED:
            return target
        return min(target + max(1, groups_per_step // 2), most)
    if num_ready >= groups_per_step:
        return max(target - max(1, groups_per_step // 8), groups_per_step)
    return target


def oldest_allowed(*, version: int, max_versions: int) -> int:
    """The oldest version whose tokens an update of `version` may use."""
    return version - max_versions


def is_too_late(group: ReadyGroup, *, oldest: int, late: Late) -> bool:
    """Whether the group is too old for an update that allows tokens of version `oldest` and newer.

    A demonstration never is.
    """
    if late is Late.train or group.newest_version == NO_VERSION:
        return False
    if late is Late.mask:
        return group.newest_version < oldest
    return group.oldest_version < oldest


def without_old_tokens(sample: Sample, oldest: int) -> Sample:
    """The sample with the tokens older than version `oldest` taken out of the loss; they stay as context."""
    is_young = (sample.cache_versions >= oldest) | (sample.cache_versions == NO_VERSION)
    return replace(sample, loss_mask=sample.loss_mask & is_young)
