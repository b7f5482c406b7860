"""What a runner and its environment processes send each other as JSON: tasks go there, prompts and steps come back.

What an environment returns is checked twice: its type in its process (`plain`), which still knows it, and its content
in the runner, which trusts no process of other people's code.

Messages of the runner            answers of the process
  {"call": 3, "operation": "step", "episode": 0, "reply": ..}
                                    {"answer": 3, "value": ..} or {"answer": 3, "failure": "step: ValueError: .."}
  {"cancel": 3, "episode": 0}       {"acknowledged": 3}
                                    {"ask": 1, "call": 3, "messages": .., "agent": .., "tools": .., "trainable": ..}
  {"reply": 1, "message": ..}
                                    {"closed": 0, "leaked": 0}, at the end of every episode
"""

import dataclasses
from typing import cast

from rlflow.envs.base import Prompt, Result, Step, ToolSchema
from rlflow.envs.images import with_images
from rlflow.errors import EnvironmentFailure
from rlflow.processes.frames import Fields
from rlflow.rewards.call import MAX_MAGNITUDE, WHAT_REWARDS_ARE, is_usable
from rlflow.types import ROLES, Message, Task


def fields_of_task(task: Task) -> Fields:
    return {"id": task.id, "prompt": task.prompt, "answer": task.answer, "kind": task.kind, "data": task.data}


def task_of(fields: Fields) -> Task:
    return Task(**{**fields, "prompt": tuple(fields["prompt"])})


def plain(call: str, value: object, expected: type[Prompt] | type[Step] | type[Result]) -> Fields:
    """The fields of what `call` returned. Raises EnvironmentFailure when it is something else."""
    if not isinstance(value, expected):
        raise EnvironmentFailure(f"{call}: expected a {expected.__name__}; got {_shown(value)}")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(expected)}
    for name in ("messages", "context"):
        if name in fields:
            fields[name] = shown_images(call, fields[name])
    return fields


def shown_images(call: str, messages: object) -> object:
    """Messages whose content is a list of parts, as `Message` has them; anything else as it is."""
    if not isinstance(messages, list):
        return messages
    try:
        return [with_images(message) if isinstance(message, dict) else message for message in messages]
    except (ValueError, OSError) as error:
        raise EnvironmentFailure(f"{call}: {error}") from error


def prompt_of(fields: Fields) -> Prompt:
    """Raises EnvironmentFailure."""
    return Prompt(messages=_messages("reset", fields["messages"]), tools=_tools("reset", fields["tools"]))


def conversation_of(fields: Fields) -> tuple[list[Message], list[ToolSchema]]:
    """What an environment asks another agent. Raises EnvironmentFailure."""
    return _messages("ask", shown_images("ask", fields["messages"])), _tools("ask", fields["tools"])


def step_of(fields: Fields) -> Step:
    """Raises EnvironmentFailure."""
    done, context = fields["done"], fields["context"]
    if not isinstance(done, bool):
        raise EnvironmentFailure(f"step: done must be True or False; got {_shown(done)}")
    return Step(
        messages=_messages("step", fields["messages"]),
        done=done,
        reward=_reward("step", fields["reward"]),
        metrics=_metrics("step", fields["metrics"]),
        context=None if context is None else _messages("step", context),
    )


def result_of(fields: Fields) -> Result:
    """Raises EnvironmentFailure."""
    return Result(reward=_reward("run", fields["reward"]), metrics=_metrics("run", fields["metrics"]))


def _messages(call: str, messages: object) -> list[Message]:
    """The messages; one with no tool calls is as good as one with an empty list of them."""
    if not isinstance(messages, list):
        raise EnvironmentFailure(f"{call}: messages must be a list; got {_shown(messages)}")
    checked: list[Message] = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise EnvironmentFailure(f"{call}: a message needs the texts `role` and `content`; got {_shown(message)}")
        if message["role"] not in ROLES:
            raise EnvironmentFailure(f"{call}: the role of a message is one of {ROLES}; got {_shown(message)}")
        calls = message.get("tool_calls")
        if not calls:
            message = {key: value for key, value in message.items() if key != "tool_calls"}
        elif not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise EnvironmentFailure(
                f"{call}: a tool call has an `id`, and a `function` with the texts `name` and `arguments`; got "
                f"{_shown(calls)}"
            )
        if not all(map(_is_part, message.get("parts", ()))):
            raise EnvironmentFailure(
                f"{call}: `parts` of a message are texts and images; got {_shown(message['parts'])}"
            )
        checked.append(cast(Message, message))
    return checked


def _is_part(part: object) -> bool:
    if not isinstance(part, dict) or part.get("type") not in ("text", "image"):
        return False
    return isinstance(part.get(part["type"]), str)


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(call, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function, dict)
        and all(isinstance(function.get(key), str) for key in ("name", "arguments"))
    )


def _tools(call: str, tools: object) -> list[ToolSchema]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvironmentFailure(f"{call}: tools must be a list of schemas; got {_shown(tools)}")
    return tools


def _reward(call: str, reward: object) -> float | None:
    if reward is None:
        return None
    if not _is_number(reward):
        raise EnvironmentFailure(f"{call}: {WHAT_REWARDS_ARE}; got {_shown(reward)}")
    return float(reward)  # pyright: ignore[reportArgumentType]  a finite number


def _metrics(call: str, metrics: object) -> dict[str, float]:
    if not isinstance(metrics, dict):
        raise EnvironmentFailure(f"{call}: metrics must be a dict; got {_shown(metrics)}")
    for name, value in metrics.items():
        if not _is_number(value):
            limit = f"a number from {-MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}"
            raise EnvironmentFailure(f"{call}: metric {name!r} must be {limit}; got {_shown(value)}")
    return {name: float(value) for name, value in metrics.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_usable(value)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else f'{text[:200]}...'} ({type(value).__name__})"
