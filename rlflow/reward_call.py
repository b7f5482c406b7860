"""Calling a user's reward function: which shape it has, what it is given, and what its answer means. Pure."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum

from rlflow.errors import ConfigError
from rlflow.types import EpisodeEnd, Message, Task, Verdict

Reward = Callable[..., object]


class Shape(StrEnum):
    """How a reward function is called; told by the names of its parameters."""

    TASK = "task"
    BATCHED = "batched"
    SOLUTION = "solution"


SHAPES = """  def reward(task, completion) -> float | dict | None                            (rlflow)
  def reward(prompts, completions, **columns) -> list[float | None]              (TRL; lists of one, chat messages)
  def reward(data_source, solution_str, ground_truth, extra_info=None) -> float  (verl)"""


def shape_of(function: Reward) -> Shape:
    """The shape of a reward function; `async def` is fine in each.

    Raises:
        ConfigError: it has none of the shapes.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.function: cannot read the signature of {name}; accepted are:\n{SHAPES}") from error
    if "completions" in parameters:
        return Shape.BATCHED
    if "solution_str" in parameters:
        return Shape.SOLUTION
    if _takes_task_and_text(list(parameters.values())):
        return Shape.TASK
    raise ConfigError(f"reward.function: {name}({', '.join(parameters)}) has none of the accepted shapes:\n{SHAPES}")


def _takes_task_and_text(parameters: Sequence[inspect.Parameter]) -> bool:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others_required = any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in parameters
        if p not in positional[:2]
    )
    return len(positional) >= 2 and positional[0].name == "task" and not others_required


def call(function: Reward, shape: Shape, task: Task, text: str) -> object | Awaitable[object]:
    """Call a reward function for one completion; for BATCHED and SOLUTION by keyword, with the names that it takes.

    `ground_truth` is the task's answer, else its `reward_model.ground_truth`; `extra_info` is the column of that name,
    else all columns. BATCHED gets all columns, and the answer as `answer`, in lists of one.
    """
    if shape is Shape.TASK:
        return function(task, text)
    if shape is Shape.SOLUTION:
        return function(**_accepted(function, _solution_arguments(task, text)))
    reply = [Message(role="assistant", content=text)]
    columns = {"answer": task.answer, **task.data, "prompts": list(task.prompt), "completions": reply}
    return function(**_accepted(function, {name: [value] for name, value in columns.items()}))


def _solution_arguments(task: Task, text: str) -> dict[str, object]:
    reward_model = task.data.get("reward_model")
    nested = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    return {
        "data_source": task.data.get("data_source"),
        "solution_str": text,
        "ground_truth": nested if task.answer is None else task.answer,
        "extra_info": task.data.get("extra_info", task.data),
    }


def _accepted(function: Reward, arguments: dict[str, object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def verdict_of(value: object, shape: Shape) -> Verdict:
    """What a reward function's answer means. Anything but a finite number, a dict with one, or None is no reward.

    A dict needs "score"; its other finite numbers, True and False become metrics, and the rest is left out.
    """
    if shape is Shape.BATCHED:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 1:
            return _invalid(f"a batched reward function returns a list with one number; got {_shown(value)}")
        value = value[0]
    if not isinstance(value, Mapping):
        return _number_verdict(value, {})
    if "score" not in value:
        return _invalid(f'a dict needs the key "score"; got the keys {_cut(", ".join(map(str, value)))}')
    extras = {str(name): extra for name, extra in value.items() if name != "score"}
    return _number_verdict(value["score"], _metrics(extras))


def _number_verdict(value: object, metrics: dict[str, float]) -> Verdict:
    if value is None:
        return Verdict(
            reward=None, end=EpisodeEnd.NO_VERDICT, detail="the reward function returned None", metrics=metrics
        )
    number = None if isinstance(value, bool) else _finite(value)
    if number is not None:
        return Verdict(reward=number, metrics=metrics)
    return _invalid(f"a reward is a finite number or None; got {_shown(value)}")


def _metrics(extras: Mapping[str, object]) -> dict[str, float]:
    numbers_by_name = {name: _finite(extra) for name, extra in extras.items()}
    return {name: number for name, number in numbers_by_name.items() if number is not None}


def _finite(value: object) -> float | None:
    """A real number as a finite float, or None."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _invalid(detail: str) -> Verdict:
    return Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=detail)


def _shown(value: object) -> str:
    return f"{_cut(repr(value))} ({type(value).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
