"""Calling a user's reward function: which shape it has, what it is given, and what its answer means. Pure.

signature -> Shape -> arguments, by name -> the function's answer -> Verdict -> combined with those of the others
"""

import inspect
import itertools
import math
import numbers
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlflow.errors import ConfigError
from rlflow.types import EpisodeEnd, Transcript, Verdict

Reward = Callable[..., object]

MAX_METRICS = 64
"""Metrics of one function; the rest is left out."""
MAX_METRIC_NAME = 100
MAX_DETAIL = 500
"""Characters."""


class Shape(StrEnum):
    """How a reward function is called, as the names of its parameters show."""

    EPISODE, BATCHED, SOLUTION = "episode", "batched", "solution"


SHAPES = """\
  def reward(completion, answer, **columns) -> float | dict | None               (rlflow; also messages and more)
  def reward(prompts, completions, **columns) -> list[float | None]              (TRL; lists of one, chat messages)
  def reward(data_source, solution_str, ground_truth, extra_info=None) -> float  (verl)"""

KNOWN: dict[Shape, tuple[str, ...]] = {
    Shape.EPISODE: (
        *("task", "prompt", "completion", "messages", "answer"),
        *("environment_reward", "end", "num_sampled", "timeout_s"),
    ),
    Shape.BATCHED: ("prompts", "completions", "answer", "trainer_state", "log_metric", "log_extra"),
    Shape.SOLUTION: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""What each shape may ask for, beside the columns of the task."""
_REFUSED = {"completion_ids": "rewards see text, not token ids", "environments": "rewards run apart from environments"}
"""Parameters of TRL's functions that are not offered."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChosenReward:
    """One reward function of a run."""

    name: str
    """Its short name: in metrics, in messages, and below reward.args."""
    function: Reward | str | None
    """A path as `rlflow.plugins.loading.load_object` takes it, or a callable that pickles by reference. None: what the
    environment gave in its steps."""
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


class MissingColumn(Exception):
    """A function needs a column that the task does not have."""


def shape_of(function: Reward) -> Shape:
    """The shape of a reward function; `async def` is fine in each.

    Raises:
        ConfigError: it has none of the shapes.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    if inspect.isclass(function):
        raise ConfigError(f"reward.function: {name} is a class; give a function, or an object that can be called")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.function: cannot read the signature of {name}; accepted are:\n{SHAPES}") from error
    shape = Shape.EPISODE
    if "completions" in parameters:
        shape = Shape.BATCHED
    elif "solution_str" in parameters:
        shape = Shape.SOLUTION
    for parameter in parameters.values():
        if not _is_required(parameter):
            continue
        reason = ""
        if parameter.kind is parameter.POSITIONAL_ONLY:
            reason = f"{parameter.name} has no name to callers, and arguments are given by name"
        elif shape is Shape.BATCHED and parameter.name in _REFUSED:
            reason = f"there is no {parameter.name}: {_REFUSED[parameter.name]}"
        if reason:
            raise ConfigError(
                f"reward.function: {name}({', '.join(parameters)}) cannot be called: {reason}; accepted are:\n{SHAPES}"
            )
    return shape


def _is_required(parameter: inspect.Parameter) -> bool:
    is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_rest


def needed_columns(function: Reward, args: Mapping[str, object]) -> list[str]:
    """The parameters that only `args` or a column of the task can fill."""
    known = KNOWN[shape_of(function)]
    parameters = inspect.signature(function).parameters
    return [name for name, each in parameters.items() if _is_required(each) and name not in known and name not in args]


def call(
    function: Reward,
    transcript: Transcript,
    args: Mapping[str, object],
    timeout_s: float,
    log_metric: Callable[[str, float], None],
) -> object | Awaitable[object]:
    """Call a reward function for one episode, by keyword, with the names that it takes; `args` go before all others.

    SOLUTION: `ground_truth` is the task's answer, else its `reward_model.ground_truth`; `extra_info` is the column of
    that name, else all columns. BATCHED gets columns, and the answer as `answer`, in lists of one.

    Raises:
        MissingColumn: a parameter is neither known nor a column of the task.
    """
    shape = shape_of(function)
    offered = {**_arguments(shape, transcript, timeout_s, log_metric), **args}
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if _is_required(parameter) and name not in offered:
            columns = ", ".join(transcript.task.data) or "none"
            raise MissingColumn(
                f"parameter {name!r} is none of {', '.join(KNOWN[shape])}, and task {transcript.task.id!r} has no such "
                f"column; it has {_cut(columns)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**offered)
    return function(**{name: value for name, value in offered.items() if name in parameters})


def _arguments(
    shape: Shape, transcript: Transcript, timeout_s: float, log_metric: Callable[[str, float], None]
) -> dict[str, object]:
    task = transcript.task
    match shape:
        case Shape.SOLUTION:
            reward_model = task.data.get("reward_model")
            nested = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
            return {
                **task.data,
                "data_source": task.data.get("data_source"),
                "solution_str": transcript.text,
                "ground_truth": nested if task.answer is None else task.answer,
                "extra_info": task.data.get("extra_info", task.data),
            }
        case Shape.BATCHED:
            columns = {"answer": task.answer, **task.data}
            columns |= {"prompts": list(transcript.prompt), "completions": list(transcript.completion)}
            lists: dict[str, object] = {name: [value] for name, value in columns.items()}
            # TRL's `log_extra` adds a column to a table that rlflow does not have.
            return {**lists, "trainer_state": None, "log_metric": log_metric, "log_extra": lambda column, values: None}
        case Shape.EPISODE:
            return {
                **task.data,
                "task": task,
                "prompt": list(transcript.prompt),
                "completion": transcript.text,
                "messages": list(transcript.completion),
                "answer": task.data.get("answer") if task.answer is None else task.answer,
                "environment_reward": transcript.environment_reward,
                "end": transcript.end,
                "num_sampled": transcript.num_sampled,
                "timeout_s": timeout_s,
            }


def verdict_of(value: object, is_batched: bool, logged: Mapping[str, object] | None = None) -> Verdict:
    """What a reward function's answer means. Anything but a finite number, a dict with one, or None is no reward.

    True and False are 1 and 0: `return completion == answer` says what it means. A dict needs "score" or "reward"; its
    other finite numbers become metrics, as do those in `logged`, and the rest is left out.
    """
    value = _plain(value)
    if is_batched:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 1:
            return invalid(f"a batched reward function returns a list with one number; got {_shown(value)}")
        value = _plain(value[0])
    extras = dict(logged or {})
    if isinstance(value, Mapping):
        key = next((key for key in ("score", "reward") if key in value), None)
        if key is None:
            return invalid(f'a dict needs the key "score" or "reward"; got the keys {_cut(", ".join(map(str, value)))}')
        extras |= {str(name): extra for name, extra in value.items() if name != key}
        value = value[key]
    finite = {name[:MAX_METRIC_NAME]: number for name, each in extras.items() if (number := _finite(each)) is not None}
    metrics = dict(itertools.islice(finite.items(), MAX_METRICS))
    if value is None:
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail="returned None", metrics=metrics)
    reward = _finite(value)
    if reward is None:
        return invalid(f"a reward is a finite number or None; got {_shown(value)}")
    return Verdict(reward=reward, metrics=metrics)


def _plain(value: object) -> object:
    """Arrays and tensors as Python's own numbers and lists."""
    to_list = None if isinstance(value, type) else getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _finite(value: object) -> float | None:
    """A real number as a finite float, or None."""
    value = _plain(value)
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def combine(chosen: Sequence[ChosenReward], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on an episode from those of all functions: the weighted sum of those that gave a number.

    None counts for nothing, as in TRL; if no function with a weight gave a number there is no verdict. If one fails,
    all do. Metrics: `rewards/<function>`, and `rewards/<function>/<metric>` for what it returned beside.
    """
    metrics: dict[str, float] = {}
    total: float | None = None
    for one, verdict in zip(chosen, verdicts, strict=True):
        if verdict.end not in (None, EpisodeEnd.NO_VERDICT):
            return Verdict(reward=None, end=verdict.end, detail=f"{one.name}: {verdict.detail}"[:MAX_DETAIL])
        if verdict.reward is not None:
            metrics[f"rewards/{one.name}"] = verdict.reward
            total = (total or 0.0) + one.weight * verdict.reward if one.weight else total
        metrics |= {f"rewards/{one.name}/{name}": value for name, value in verdict.metrics.items()}
    if total is None:
        pairs = zip(chosen, verdicts, strict=True)
        details = "; ".join(f"{one.name}: {verdict.detail}" for one, verdict in pairs if verdict.detail)
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail=details[:MAX_DETAIL], metrics=metrics)
    if not math.isfinite(total):
        return invalid(f"the weighted sum of the rewards is {total}")
    return Verdict(reward=total, metrics=metrics)


def environment_verdict(transcript: Transcript) -> Verdict:
    """What the environment gave in its steps: 0 if a limit ended the episode before it gave anything."""
    if transcript.environment_reward is None and transcript.end.is_truncated:
        return Verdict(reward=0.0)
    if transcript.environment_reward is None:
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail="the environment gave no reward in its steps")
    return verdict_of(transcript.environment_reward, is_batched=False)


def invalid(detail: str) -> Verdict:
    return Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=detail)


def _shown(value: object) -> str:
    return f"{_cut(reprlib.repr(value))} ({type(value).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
