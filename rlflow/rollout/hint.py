"""What a teacher is told that the policy is not: the right answer, or a hint. Pure.

    the task, what the policy was asked -> the template of teacher.args.prompt -> what the teacher is asked instead

The teacher then says how likely the policy's reply is for somebody who knows more, so that a model can teach itself.
"""

import json
import re
from collections.abc import Iterable, Sequence

from rlflow.config import TeacherConfig
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

_FIELD = re.compile(r"\{(\w+)\}")
_ASKED = "prompt"


def hinted(messages: Sequence[Message], task: Task, template: str) -> list[Message]:
    """The conversation with the filled template in the place of the last message before the first reply.

    Example: "2 + 3 =" and "{prompt} (It is {answer}.)" -> "2 + 3 = (It is 5.)"
    """
    replies = (place for place, message in enumerate(messages) if message["role"] == "assistant")
    place = next(replies, len(messages)) - 1
    if place < 0:
        return list(messages)
    values = _known(task) | {_ASKED: messages[place]["content"]}
    # In one pass: what a value has in braces is no field.
    filled = _FIELD.sub(lambda found: values.get(found[1], found[0]), template)
    return [*messages[:place], {**messages[place], "content": filled}, *messages[place + 1 :]]


def check_hints(teacher: TeacherConfig, tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a template that adds nothing to the prompt, and for a task that lacks a field of it."""
    template = teacher.args.get("prompt")
    if not teacher.models or template is None:
        return
    fields = set(_FIELD.findall(template))
    if template.strip() == f"{{{_ASKED}}}":
        raise ConfigError("teacher.args.prompt={prompt} has no effect; add what only the teacher may know")
    for task in tasks:
        if missing := sorted(fields - {_ASKED} - _known(task).keys()):
            raise ConfigError(
                f"teacher.args.prompt has the field {{{missing[0]}}}, which the task {task.id} lacks; it has "
                f"{', '.join(sorted({_ASKED, *_known(task)}))}; write a field that every task has, or add the column"
            )


def _known(task: Task) -> dict[str, str]:
    """Field -> text."""
    values = task.data | ({} if task.answer is None else {"answer": task.answer})
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }
