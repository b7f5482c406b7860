"""1 for the right answer after the calculator was used, 0 otherwise."""

from __future__ import annotations

from rlflow.envs.arithmetic.reward import is_right
from rlflow.types import Message, Task


def right_by_tool(task: Task, completion: str, messages: list[Message]) -> float | None:
    """1.0 when the last reply's last number is the answer and a tool has answered before, else 0.0."""
    if not any(message["role"] == "tool" for message in messages):
        return 0.0
    return is_right(task, completion)
