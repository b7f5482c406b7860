"""What an answer is worth: the tool must have been used for it."""

from __future__ import annotations

from rlflow.envs.arithmetic.reward import is_right
from rlflow.types import Message, Task

RIGHT_CALL = 0.2
"""The reward of a wrong answer after the right call."""


def right_by_tool(task: Task, completion: str, messages: list[Message]) -> float | None:
    """1.0 when the tool has said the answer and the last reply says so too, RIGHT_CALL without the latter, else 0.0."""
    if not any(message["role"] == "tool" and message["content"] == task.answer for message in messages):
        return 0.0
    return 1.0 if is_right(task, completion) else RIGHT_CALL
