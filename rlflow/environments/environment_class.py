"""An Environment or Program class as a whole environment: where its tasks come from, and what its constructor gets."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Program, takes_task
from rlflow.envs.dataset.env import load as load_rows
from rlflow.errors import ConfigError
from rlflow.plugins.options import check_options, parameters_of


def spec_of_class(name: str, kind: type[Environment | Program], arguments: Mapping[str, Any]) -> EnvironmentSpec:
    """The class as it is. Each of `arguments` goes to the parameters of its name: of its tasks, of its constructor.
    A required parameter `task` of the constructor is given the episode's task.

    Its tasks are those of a static or class method `tasks`, and `evaluation_tasks` if it has one; without `tasks`, the
    rows of `path`, as `rlflow.envs.dataset` reads them. What the class gives in its steps is the reward.

    Raises:
        ConfigError: an argument that nothing takes or that is missing, or an abstract class.
    """
    _check_whole(name, kind)
    tasks, evaluation_tasks = (_maker(name, kind, method) for method in ("tasks", "evaluation_tasks"))
    if tasks is None and "path" not in arguments:
        raise ConfigError(
            f"env.name={name} has no tasks; give it a static method `tasks` that returns a list of Task, or "
            "env.args.path=FILE with one row for each"
        )
    makers = [load_rows] if tasks is None else [maker for maker in (tasks, evaluation_tasks) if maker]
    parameters = [*(each for maker in makers for each in parameters_of(maker)), *_parameters(kind, arguments)]
    check_options(arguments, parameters, "env.args", f"env.name={name}")
    build = partial(kind, **_taken_by(kind, arguments))
    if tasks is None:
        return replace(load_rows(**_taken_by(load_rows, arguments)), build=build, reward=None)
    return EnvironmentSpec(
        tasks=partial(tasks, **_taken_by(tasks, arguments)),
        build=build,
        evaluation_tasks=evaluation_tasks and partial(evaluation_tasks, **_taken_by(evaluation_tasks, arguments)),
    )


def build_of_class(
    name: str, kind: type[Environment | Program], arguments: Mapping[str, Any]
) -> Callable[..., Environment | Program]:
    """What builds the class, where the tasks are somebody else's. Raises ConfigError as `spec_of_class` does."""
    _check_whole(name, kind)
    check_options(arguments, _parameters(kind, arguments), "env.args", f"env.name={name}")
    return partial(kind, **arguments)


def _check_whole(name: str, kind: type) -> None:
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"env.name={name} does not define {missing}; an environment needs it")


def _parameters(kind: type, arguments: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Those of the constructor that `arguments` may set. The run gives it the episode's task, unless they do."""
    return [each for each in parameters_of(kind) if each.name != "task" or "task" in arguments or not takes_task(kind)]


def _maker(name: str, kind: type, method: str) -> Callable[..., Any] | None:
    declared = inspect.getattr_static(kind, method, None)
    if declared is None:
        return None
    if not isinstance(declared, staticmethod | classmethod):
        raise ConfigError(
            f"env.name={name}: `{method}` is called before there is an episode; make it a static or a class method"
        )
    return getattr(kind, method)


def _taken_by(taker: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(taker)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    names = {each.name for each in parameters}
    return {name: value for name, value in arguments.items() if name in names}
