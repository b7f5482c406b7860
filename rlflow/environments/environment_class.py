"""An Environment or Program class as a whole environment: where its tasks come from, and what its constructor gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Program
from rlflow.envs.dataset import load as load_rows
from rlflow.errors import ConfigError

TASKS = "tasks"
EVALUATION_TASKS = "evaluation_tasks"


def spec_of_class(name: str, kind: type[Environment | Program], arguments: Mapping[str, Any]) -> EnvironmentSpec:
    """The class as it is. Each of `arguments` goes where a parameter has its name: to its tasks, to its constructor.

    Its tasks are those of a static or class method `tasks`, and `evaluation_tasks` if it has one; without `tasks`, the
    rows of `path`, as `rlflow.envs.dataset` reads them. What the class gives in its steps is the reward.

    Raises:
        ConfigError: an argument that nothing takes or that is missing, or an abstract class.
    """
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"env.name={name} does not define {missing}; an environment needs it")
    tasks, evaluation_tasks = (_maker(name, kind, method) for method in (TASKS, EVALUATION_TASKS))
    makers = [load_rows] if tasks is None else [maker for maker in (tasks, evaluation_tasks) if maker]
    check_arguments(name, [*makers, kind], arguments)
    build = partial(kind, **_taken_by(kind, arguments))
    if tasks is None:
        return replace(load_rows(**_taken_by(load_rows, arguments)), build=build, reward=None)
    return EnvironmentSpec(
        tasks=partial(tasks, **_taken_by(tasks, arguments)),
        build=build,
        evaluation_tasks=evaluation_tasks and partial(evaluation_tasks, **_taken_by(evaluation_tasks, arguments)),
    )


def _maker(name: str, kind: type, method: str) -> Callable[..., Any] | None:
    declared = inspect.getattr_static(kind, method, None)
    if declared is None:
        return None
    if not isinstance(declared, staticmethod | classmethod):
        raise ConfigError(
            f"env.name={name}: `{method}` is called before there is an episode; make it a static or a class method"
        )
    return getattr(kind, method)


def check_arguments(name: str, takers: Sequence[Callable[..., Any]], arguments: Mapping[str, Any]) -> None:
    """ConfigError for an argument that none of `takers` has a parameter for, and for one that is missing."""
    parameters = [parameter for taker in takers for parameter in _parameters(taker)]
    accepted = list(dict.fromkeys(each.name for each in parameters if each.kind is not each.VAR_KEYWORD))
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for argument in arguments:
        if argument not in accepted and not takes_any:
            close = get_close_matches(argument, accepted, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"env.args.{argument} is not an argument of env.name={name}, which takes "
                f"{', '.join(accepted) or 'no arguments'}{hint}"
            )
    for each in parameters:
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD and each.name not in arguments:
            raise ConfigError(f"env.args.{each.name} is required by env.name={name}")


def _taken_by(taker: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(taker)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    names = {each.name for each in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _parameters(taker: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that can be given by name, and **keywords."""
    parameters = inspect.signature(taker).parameters.values()
    return [
        each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY, each.VAR_KEYWORD)
    ]
