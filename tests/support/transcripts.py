"""Transcripts of episodes, for tests of what scores them."""

from __future__ import annotations

from typing import Any

from rlflow.types import EpisodeEnd, Json, Message, Task, Transcript

QUESTION = Message(role="user", content="2+2")
TASK = Task(id="t/0", prompt=(QUESTION,), answer="4", data={"level": 3})


def said(*replies: str, task: Task = TASK, **changes: Any) -> Transcript:
    """An episode in which the policy replied so, with "go on" after each reply but the last."""
    messages: list[Message] = []
    for reply in replies:
        messages += [Message(role="assistant", content=reply), Message(role="user", content="go on")]
    fields: dict[str, Any] = {
        "task": task,
        "prompt": task.prompt,
        "completion": tuple(messages[:-1]),
        "environment_reward": None,
        "end": EpisodeEnd.COMPLETED,
        "num_sampled": sum(map(len, replies)),
    }
    return Transcript(**{**fields, **changes})


def task_with(answer: str | None = "4", **columns: Json) -> Task:
    return Task(id="t/1", prompt=(QUESTION,), answer=answer, data=columns)
