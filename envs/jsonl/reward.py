"""A file of tasks brings no reward; `reward.function` or `reward.model` is required beside it."""

from __future__ import annotations

from rlflow.types import Task


def no_reward(task: Task, completion: str) -> float | None:
    """No verdict. An environment that has this as its reward cannot run without a function or a model to score."""
    return None
