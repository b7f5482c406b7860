"""A file of tasks brings no reward; `reward.function` is required beside it."""

from __future__ import annotations

from rlflow.types import Task


def no_reward(task: Task, completion: str) -> float | None:
    """No verdict. An environment that has this as its reward cannot run without `reward.function`."""
    return None
