"""The rewards of a run, from its settings: names -> functions with weights and arguments, checked.

reward.function: [math, my.py:brief], reward.weights: [1, 0.1], reward.args: {brief: {limit: 40}}
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlflow.config import RewardConfig
from rlflow.envs.base import OwnReward, RewardFunction
from rlflow.errors import ConfigError
from rlflow.plugins.catalog import Catalog, modules_of
from rlflow.plugins.given import find_given, is_given
from rlflow.plugins.names import did_you_mean
from rlflow.plugins.options import check_options, parameters_of
from rlflow.rewards.call import KNOWN, ChosenReward, Log, MissingColumn, call, needed_columns, shape_of
from rlflow.rewards.models import model_paths, weights_of
from rlflow.types import EpisodeEnd, Task, Transcript

ENVIRONMENT = "environment"
"""The name of what the environment itself gives."""
REWARDS = Catalog(
    setting="reward.function",
    what="a reward",
    shipped=modules_of("rlflow.envs.rewards"),
    group="rlflow.rewards",
    others=(ENVIRONMENT,),
)
_NOTHING = Transcript(
    task=Task(id="", prompt=(), answer=""),
    prompt=(),
    completion=(),
    environment_reward=None,
    end=EpisodeEnd.COMPLETED,
    num_sampled=0,
)


def choose_rewards(config: RewardConfig, own: OwnReward) -> list[ChosenReward]:
    """The functions that score, in their order; see `models.calls_functions`.

    `own` is the environment's function, which the name `environment` means; if it has none, that means what the
    environment gives in its steps. With a function for each kind of task it means all of these, named by their kinds.

    Raises ConfigError for an unknown name, a function that cannot be loaded or called, wrong weights or arguments.
    """
    given = ENVIRONMENT if config.function is None else config.function
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"reward.function must be a name, or a list of names; got {config.function!r:.200}")
    weights, models = weights_of(config)[: len(names)], model_paths(config)
    functions: list[Any] = [own if name == ENVIRONMENT else REWARDS.path_of(name) for name in names]
    # A function that was given travels itself, because no other process finds it by a path.
    functions = [find_given(each) if isinstance(each, str) and is_given(each) else each for each in functions]
    short_names = [name.rpartition(":")[2].rpartition(".")[2] if ":" in name else name for name in names]
    for name in config.args:
        if name not in short_names and name not in models:
            raise ConfigError(
                f"reward.args.{name} has no effect: reward.function names no {name!r}"
                f"{did_you_mean(name, short_names)}; it names {', '.join(short_names)}"
            )
    chosen: list[ChosenReward] = []
    for name, function, weight in zip(short_names, functions, weights, strict=True):
        args = config.args.get(name)
        if args is not None and not isinstance(args, Mapping):
            raise ConfigError(f"reward.args.{name} must be arguments as name: value; got {args!r:.80}")
        one = ChosenReward(name=name, function=function, weight=weight, args=dict(args or {}))
        chosen += _of_kinds(one, function) if isinstance(function, Mapping) else [one]
    (name, count), *_ = Counter(one.name for one in chosen).most_common(1)
    if count > 1:
        raise ConfigError(
            f"reward.function names {count} functions {name!r}, and metrics and arguments go by that name; rename one"
        )
    if both := sorted(models.keys() & {one.name for one in chosen}):
        raise ConfigError(
            f"reward.function and reward.model both name {both[0]!r}, and metrics and options go by that name; rename "
            "the model"
        )
    for one in chosen:
        _check(one)
    return chosen


def _of_kinds(one: ChosenReward, functions: Mapping[str, Any]) -> list[ChosenReward]:
    """The environment's reward where it has one for each kind of task."""
    return [replace(one, name=kind, function=each, kind=kind) for kind, each in functions.items()]


def is_environment_alone(chosen: Sequence[ChosenReward]) -> bool:
    """Whether nothing has to be called to score."""
    return all(one.function is None for one in chosen)


def columns_to_check(chosen: Iterable[ChosenReward]) -> dict[str, str]:
    """Column -> the function that cannot be called for a task without it."""
    return {column: one.name for one in chosen for column in needed_columns(load(one), one.args)}


def check_columns(columns: Mapping[str, str], tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a column that no task has: it is probably misspelt. Some tasks may be without."""
    missing = dict(columns)
    seen: set[str] = set()
    for task in tasks:
        if not missing:
            return
        seen.update(task.data)
        missing = {column: name for column, name in missing.items() if column not in task.data}
    for column, name in missing.items():
        known = sorted({*seen, *(each for names in KNOWN.values() for each in names)})
        raise ConfigError(
            f"the reward {name} has the parameter {column!r}, which no task has as a column"
            f"{did_you_mean(column, known)}; columns are {', '.join(sorted(seen)) or 'none'}; else set "
            f"reward.args.{name}.{column}"
        )


def load(one: ChosenReward) -> RewardFunction:
    """The function itself."""
    if one.function is None:
        return lambda: None  # is never called
    if not isinstance(one.function, str):
        return one.function
    function = REWARDS.find(one.function)
    if not callable(function):
        raise ConfigError(f"reward.function={one.function} must be a function; got {function!r:.80}")
    return function


def _check(one: ChosenReward) -> None:
    """Raise ConfigError for a function that cannot be called, or not with its arguments."""
    function = load(one)
    known = KNOWN[shape_of(function)]
    if (one.name == ENVIRONMENT or one.kind) and one.args:
        raise ConfigError("reward.args.environment has no effect; an environment takes its arguments from env.args")
    for name in one.args:
        if name in known:
            raise ConfigError(
                f"reward.args.{one.name}.{name} cannot be set: it is different in every episode; leave it out"
            )
    # A parameter that is not set may be a column of the tasks.
    optional = [
        each if each.kind is each.VAR_KEYWORD else each.replace(default=None)
        for each in parameters_of(function)
        if each.name not in known
    ]
    check_options(one.args, optional, f"reward.args.{one.name}", one.name)
    if one.function in REWARDS.shipped.values():  # a call finds arguments out of range, and missing packages
        try:
            answer = call(function, [_NOTHING], one.args, 0.0, Log(episodes=[{}]))
        except MissingColumn:
            return
        if inspect.iscoroutine(answer):
            answer.close()
