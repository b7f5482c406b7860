"""The rewards of a run, from its settings: names -> functions with weights and arguments, checked.

reward.function: [math, my.py:brief], reward.weights: [1, 0.1], reward.args: {brief: {limit: 40}}
"""

from __future__ import annotations

import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlflow.config import RewardConfig
from rlflow.envs import rewards as library
from rlflow.envs.base import RewardFunction
from rlflow.errors import ConfigError
from rlflow.plugins.entry_points import offered
from rlflow.plugins.loading import load_object
from rlflow.plugins.names import fits, hints_of, nearest, shown
from rlflow.rewards.call import KNOWN, ChosenReward, MissingColumn, call, needed_columns, shape_of
from rlflow.types import EpisodeEnd, Task, Transcript

ENVIRONMENT = "environment"
"""The name of what the environment itself gives."""
GROUP = "rlflow.rewards"
"""The entry points by which a package offers rewards."""
SHIPPED = tuple(sorted(module.name for module in pkgutil.iter_modules(library.__path__)))
_NOTHING = Transcript(
    task=Task(id="", prompt=(), answer=""),
    prompt=(),
    completion=(),
    environment_reward=None,
    end=EpisodeEnd.COMPLETED,
    num_sampled=0,
)


def reward_names(config: RewardConfig) -> list[str]:
    """The names that reward.function gives, ["environment"] when it is null.

    Raises ConfigError for anything but a name or a list of names.
    """
    given = [config.function] if not isinstance(config.function, Sequence | None) else config.function
    names = [ENVIRONMENT] if given is None else [given] if isinstance(given, str) else list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"reward.function must be a name, or a list of names; got {config.function!r:.200}")
    return names


def choose_rewards(config: RewardConfig, own: RewardFunction | None) -> list[ChosenReward]:
    """The functions that score, in their order; for a run without `reward.model`.

    `own` is the environment's function, which the name `environment` means; where there is none, that means what the
    environment gives in its steps.

    Raises ConfigError for an unknown name, a function that cannot be loaded or called, wrong weights or arguments.
    """
    names = reward_names(config)
    weights = _weights(config.weights, len(names))
    chosen = [_chosen(name, weight, own) for name, weight in zip(names, weights, strict=True)]
    (name, count), *_ = Counter(one.name for one in chosen).most_common(1)
    if count > 1:
        raise ConfigError(
            f"reward.function names {count} functions {name!r}, and metrics and arguments go by that name; rename one"
        )
    _check_names_of_args(config.args, [one.name for one in chosen])
    bound = [replace(one, args=_arguments(config.args, one.name)) for one in chosen]
    for one in bound:
        _check(one)
    return bound


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
            f"the reward {name} has the parameter {column!r}, which no task has as a column; {nearest(column, known)}; "
            f"columns are {', '.join(sorted(seen)) or 'none'}; else set reward.args.{name}.{column}"
        )


def load(one: ChosenReward) -> RewardFunction:
    """The function itself."""
    if one.function is None:
        return _no_call
    if not isinstance(one.function, str):
        return one.function
    try:
        function = load_object(one.function)
    except ConfigError as error:
        raise ConfigError(f"reward.function: {error}") from error
    if not callable(function):
        raise ConfigError(f"reward.function={one.function} must be a function; got {function!r:.80}")
    return function


def _no_call() -> None:
    """In place of a function that is never called."""


def _weights(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ConfigError(
            f"reward.weights has {len(weights)} numbers and reward.function {count} names; give one weight for each"
        )
    return weights


def _chosen(name: str, weight: float, own: RewardFunction | None) -> ChosenReward:
    if name == ENVIRONMENT:
        return ChosenReward(name=name, function=own, weight=weight)
    path = _path(name)
    short = path.rpartition(":")[2].rpartition(".")[2] if ":" in name else name
    return ChosenReward(name=short, function=path, weight=weight)


def _path(name: str) -> str:
    """Where the function of this name is; files by their absolute path, for processes with another directory."""
    source, colon, attribute = name.rpartition(":")
    if colon:
        is_file = source.endswith(".py")
        return f"{Path(source).expanduser().resolve()}:{attribute}" if is_file else name
    packages = offered(GROUP)
    if name in SHIPPED and name in packages:
        raise ConfigError(
            f"reward.function={name} is shipped with rlflow and also registered by an installed package; name the one "
            f"you mean by its path, rlflow.envs.rewards.{name}:{name} or {packages[name]}"
        )
    if name in SHIPPED:
        return f"rlflow.envs.rewards.{name}:{name}"
    if name in packages:
        return packages[name]
    known = [ENVIRONMENT, *SHIPPED, *packages]
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"reward.function={name} is not a reward; {hint}There are {', '.join(known)}; your own is "
        "package.module:function or file.py:function"
    )


def _check_names_of_args(args: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in args:
        if name not in names:
            raise ConfigError(
                f"reward.args.{name} has no effect: reward.function names no {name!r}; {nearest(name, names)}; it "
                f"names {', '.join(names)}"
            )


def _arguments(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = args.get(name)
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(f"reward.args.{name} must be arguments as name: value; got {own!r:.80}")
    return dict(own or {})


def _check(one: ChosenReward) -> None:
    """That it can be called, takes its arguments, and has no objection to them."""
    function = load(one)
    shape_of(function)
    if one.name == ENVIRONMENT and one.args:
        raise ConfigError("reward.args.environment has no effect; an environment takes its arguments from env.args")
    _check_arguments(function, one)
    if isinstance(one.function, str) and one.function.startswith(f"{library.__name__}."):
        _try(function, one.args)


def _check_arguments(function: RewardFunction, one: ChosenReward) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = KNOWN[shape_of(function)]
    options = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD and name not in known]
    hints = hints_of(function)
    for name, value in one.args.items():
        where = f"reward.args.{one.name}.{name}"
        if name in known:
            raise ConfigError(f"{where} cannot be set: it is different in every episode; leave it out")
        if name not in options and not takes_any:
            listed = f"which takes {', '.join(options)}" if options else "which takes none"
            raise ConfigError(f"{where} is not an argument of {one.name}, {listed}; {nearest(name, options)}")
        if name in hints and not fits(value, hints[name]):
            raise ConfigError(f"{where} must be {shown(hints[name])}; got {value!r:.80}")


def _try(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Call a shipped function on nothing: it raises ConfigError for an argument out of range or a missing package."""
    try:
        answer = call(function, _NOTHING, args, 0.0, lambda name, value: None)
    except MissingColumn:
        return
    if inspect.iscoroutine(answer):
        answer.close()
