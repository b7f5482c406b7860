"""Who may start, who goes first, who is too old: pure functions of counts and versions."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.types import ReadyGroup


def admission_budget(
    *, step: int, num_steps: int, groups_per_step: int, max_versions: int, num_trained: int, num_live: int
) -> int:
    """How many groups may start now.

    While step `step` (counted from 0) is being filled, groups for it and for the `max_versions` steps after it may
    exist; a group that is dropped gives its place back. AReaL (2505.24298, section 4.1) bounds the same sum, there
    without drops.
    """
    last_step = min(step + 1 + max_versions, num_steps)
    return max(0, last_step * groups_per_step - num_trained - num_live)


def is_stale(*, oldest_version: int, version: int, max_versions: int) -> bool:
    """Whether an update of `version` must not use tokens of `oldest_version`."""
    return version - oldest_version > max_versions


def take_order(ready: Sequence[ReadyGroup]) -> list[ReadyGroup]:
    """Oldest policy first, then admission order: nothing waits until it is too old while younger groups pass it."""
    return sorted(ready, key=lambda group: (group.oldest_version, group.group_id))
