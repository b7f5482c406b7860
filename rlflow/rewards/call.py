"""Calling a user's reward function: which shape it has, what it is given, and what its answer means. Pure.

signature -> Shape -> arguments, by name -> the function's answer -> Verdicts -> combined with those of the others
"""

import inspect
import itertools
import numbers
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rlflow.errors import ConfigError
from rlflow.runtime.kinds import name_for
from rlflow.types import EpisodeEnd, Task, Transcript, Verdict

Reward = Callable[..., object]

MAX_METRICS = 64
"""Metrics of one function; the rest is left out."""
MAX_METRIC_NAME = 100
MAX_DETAIL = 500
"""Characters."""
MAX_MAGNITUDE = 1e15
"""The largest reward or metric: a million of them can be squared and added up in 32 bits."""
WHAT_REWARDS_ARE = f"a reward is None, or a number from {-MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}"


class Shape(StrEnum):
    """How a reward function is called, as the names of its parameters show."""

    EPISODE, GROUP, SOLUTION = "episode", "group", "solution"


SHAPES = """\
  def reward(completion, answer, **columns) -> float | dict | None               (rlflow; also messages and more)
  def reward(prompts, completions, **columns) -> list[float | None]              (TRL; all episodes of a group)
  def reward(data_source, solution_str, ground_truth, extra_info=None) -> float  (verl)"""

KNOWN: dict[Shape, tuple[str, ...]] = {
    Shape.EPISODE: (
        *("task", "prompt", "completion", "messages", "answer"),
        *("environment_reward", "end", "num_sampled", "timeout_s"),
    ),
    Shape.GROUP: (
        *("prompts", "completions", "completion_ids", "answer", "log_metric", "log_extra"),
        *("task", "messages", "environment_reward", "end", "num_sampled", "timeout_s"),
    ),
    Shape.SOLUTION: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""What each shape may ask for, beside the columns of the task."""
_OURS = frozenset({"task", "messages", "environment_reward", "end", "num_sampled"})
_REFUSED = {
    "environments": "rewards run apart from environments; let `step` or `get_reward` give the reward",
    "trainer_state": "rewards run apart from the trainer; leave the parameter out",
}
"""Parameters of TRL's functions that are not offered, with or without a default."""


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
    kind: str = ""
    """The kind of tasks that it scores, with the kinds below it (`a` has `a/b`); empty: all."""

    def scores(self, task: Task) -> bool:
        return not self.kind or name_for(task.kind, [self.kind]) is not None


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
    if not {"completions", "completion_ids", "environments"}.isdisjoint(parameters):
        shape = Shape.GROUP
    elif "solution_str" in parameters:
        shape = Shape.SOLUTION
    for parameter in parameters.values():
        reason = ""
        if parameter.kind is parameter.POSITIONAL_ONLY and _is_required(parameter):
            reason = f"{parameter.name} has no name to callers, and arguments are given by name"
        elif shape is Shape.GROUP and parameter.name in _REFUSED:
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


@dataclass(kw_only=True, slots=True, frozen=True)
class Log:
    """What TRL's functions log beside the rewards: numbers become metrics, and the rest is left out."""

    episodes: list[dict[str, object]]
    """Name -> value, for each episode."""

    def metric(self, name: str, value: object) -> None:
        """One value for the whole group."""
        self.extra(name, [value] * len(self.episodes))

    def extra(self, column: str, values: Sequence[object]) -> None:
        """One value for each episode."""
        for episode, value in zip(self.episodes, values, strict=False):
            episode[column] = value


def call(
    function: Reward, transcripts: Sequence[Transcript], args: Mapping[str, object], timeout_s: float, log: Log
) -> object | Awaitable[object]:
    """Call a reward function by keyword, with the names that it takes; `args` go before all others.

    GROUP gets the episodes of one task, all of its arguments but `args` in lists; the other shapes get one episode.
    SOLUTION: `ground_truth` is the task's `reward_model.ground_truth`, else its answer; `extra_info` is the column of
    that name, else all columns.

    Raises:
        MissingColumn: a parameter is neither known nor a column of the task.
    """
    shape, task = shape_of(function), transcripts[0].task
    if shape is Shape.GROUP:
        offered = {**_group_arguments(transcripts, timeout_s, log), **args}
    else:
        offered = {**_arguments(shape, transcripts[0], timeout_s), **args}
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if _is_required(parameter) and name not in offered:
            columns = ", ".join(task.data) or "none"
            raise MissingColumn(
                f"parameter {name!r} is none of {', '.join(KNOWN[shape])}, and task {task.id!r} has no such "
                f"column; it has {_cut(columns)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**offered)
    return function(**{name: value for name, value in offered.items() if name in parameters})


def _arguments(shape: Shape, transcript: Transcript, timeout_s: float) -> dict[str, object]:
    task = transcript.task
    if shape is Shape.SOLUTION:
        reward_model = task.data.get("reward_model")
        nested = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        return {
            **task.data,
            "data_source": task.data.get("data_source"),
            "solution_str": transcript.response,
            "ground_truth": task.answer if nested is None else nested,
            "extra_info": task.data.get("extra_info", task.data),
        }
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


def _group_arguments(transcripts: Sequence[Transcript], timeout_s: float, log: Log) -> dict[str, object]:
    """A column goes before what only rlflow offers, because TRL has columns of any other name."""
    rows: list[dict[str, object]] = []
    for one in transcripts:
        ours = {name: value for name, value in _arguments(Shape.EPISODE, one, timeout_s).items() if name in _OURS}
        is_text = one.task.prompt_is_text
        rows.append(
            {
                **ours,
                "answer": one.task.answer,
                **one.task.data,
                "prompts": one.task.prompt[-1]["content"] if is_text else list(one.prompt),
                "completions": one.response if is_text else list(one.completion),
                "completion_ids": one.completion_ids.tolist(),
            }
        )
    lists: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
    return {"timeout_s": timeout_s, **lists, "log_metric": log.metric, "log_extra": log.extra}


def verdicts_of(value: object, log: Log) -> list[Verdict]:
    """What the answer of a function that sees a group means: a list with one answer for each episode."""
    value, count = _plain(value), len(log.episodes)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != count:
        what = f"a function with `completions` returns a list with one number for each of the {count} episodes"
        return [invalid(f"{what}; got {_shown(value)}")] * count
    return [verdict_of(each, logged) for each, logged in zip(value, log.episodes, strict=True)]


def verdict_of(value: object, logged: Mapping[str, object] | None = None) -> Verdict:
    """What a reward function's answer means. Anything but a finite number, a dict with one, or None is no reward.

    True and False are 1 and 0: `return completion == answer` says what it means. A dict needs "score" or "reward"; its
    other finite numbers become metrics, as do those in `logged`, and the rest is left out.
    """
    value = _plain(value)
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
        return invalid(f"{WHAT_REWARDS_ARE}; got {_shown(value)}")
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
    return number if is_usable(number) else None


def is_usable(number: float) -> bool:
    """Whether a number is finite, and not so large that its square is not."""
    return abs(number) <= MAX_MAGNITUDE


def combine(chosen: Sequence[ChosenReward], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on an episode from those of several functions: the weighted sum of those that gave a number.

    None counts for nothing, as in TRL; if no function with a weight gave a number there is no verdict. If one fails,
    all do. Metrics: `rewards/<function>`, and `rewards/<function>/<metric>` for what it returned beside.
    """
    return added([_weighted(one, verdict) for one, verdict in zip(chosen, verdicts, strict=True)])


def added(parts: Sequence[Verdict]) -> Verdict:
    """The verdict of which these are parts: their sum; the first failure stands for all."""
    for part in parts:
        if part.end not in (None, EpisodeEnd.NO_VERDICT):
            return replace(part, awaits_group=False)
    metrics = {name: value for part in parts for name, value in part.metrics.items()}
    rewards = [part.reward for part in parts if part.reward is not None]
    if not rewards:
        detail = "; ".join(part.detail for part in parts if part.detail)[:MAX_DETAIL]
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail=detail, metrics=metrics)
    if not is_usable(total := sum(rewards)):
        return invalid(f"the weighted sum of the rewards is {total}; {WHAT_REWARDS_ARE}")
    return Verdict(reward=total, metrics=metrics)


def _weighted(one: ChosenReward, verdict: Verdict) -> Verdict:
    """A function's part of the verdict. One without a weight is only a metric."""
    detail = f"{one.name}: {verdict.detail}"[:MAX_DETAIL] if verdict.detail else ""
    if verdict.end not in (None, EpisodeEnd.NO_VERDICT):
        return Verdict(reward=None, end=verdict.end, detail=detail)
    metrics = {} if verdict.reward is None else {f"rewards/{one.name}": verdict.reward}
    metrics |= {f"rewards/{one.name}/{name}": value for name, value in verdict.metrics.items()}
    if verdict.reward is None or not one.weight:
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail=detail, metrics=metrics)
    return Verdict(reward=one.weight * verdict.reward, metrics=metrics)


def environment_verdict(transcript: Transcript) -> Verdict:
    """What the environment gave in its steps: 0 if a limit ended the episode before it gave anything."""
    if transcript.environment_reward is None and transcript.end.is_truncated:
        return Verdict(reward=0.0)
    if transcript.environment_reward is None:
        return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail="the environment gave no reward in its steps")
    return verdict_of(transcript.environment_reward)


def invalid(detail: str) -> Verdict:
    return Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=detail)


def _shown(value: object) -> str:
    return f"{_cut(reprlib.repr(value))} ({type(value).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
