"""Which environment `env.name` means -> EnvironmentSpec.

shipped name | name that an installed package registers | package.module:Name | file.py:Name
    -> function that returns a spec | Environment or Program class | TRL-style class
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import rlflow.envs
from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.environments.environment_class import check_arguments, spec_of_class
from rlflow.envs.base import Environment, EnvironmentSpec, Program, SingleTurn
from rlflow.errors import ConfigError
from rlflow.plugins.entry_points import offered
from rlflow.plugins.loading import load_object
from rlflow.rewards.choose import check_columns, choose_rewards, columns_to_check
from rlflow.types import Task

ENTRY_POINTS = "rlflow.environments"
"""Group in which a package registers its environments: `name = "package.module:Name"`."""


def load_environment(config: EnvConfig, reward: RewardConfig) -> EnvironmentSpec:
    """The environment of a run; its `tasks()` checks every task.

    Raises ConfigError for an unknown name, for arguments that nothing takes, and for a missing reward.
    """
    spec = _spec_of(config)
    if reward.function is None and reward.model is None and spec.reward is None and _is_silent(spec.build):
        raise ConfigError(
            f"reward.function is required with env.name={config.name}, which has no reward of its own; "
            "give package.module:function or file.py:function, or a reward.model"
        )
    # Rewards that cannot be loaded or called show before the workers start, which load them again.
    columns = columns_to_check(choose_rewards(reward, spec.reward)) if reward.model is None else {}
    held_out = spec.evaluation_tasks
    return replace(
        spec,
        tasks=partial(checked_tasks, config.name, spec.tasks, columns),
        evaluation_tasks=held_out and partial(checked_tasks, f"{config.name}, evaluation", held_out, columns),
    )


def held_out_tasks(config: Config, spec: EnvironmentSpec) -> Sequence[Task]:
    """What `eval.every` plays, nothing when that is 0; ConfigError when the environment has nothing to play."""
    if not config.eval.every:
        return ()
    if spec.evaluation_tasks is None:
        raise ConfigError(
            f"eval.every is {config.eval.every}, but env.name={config.env.name} with these env.args has no evaluation "
            "tasks; give it some (`evaluation_tasks` of its EnvironmentSpec), or set eval.every to 0"
        )
    return spec.evaluation_tasks()


def checked_tasks(
    name: str, tasks: Callable[[], Sequence[Task]], columns: Mapping[str, str] | None = None
) -> Sequence[Task]:
    """The tasks, or ConfigError that names the first one that cannot be used.

    `columns` are those that rewards need, each with the name of the reward.
    """
    rows = tasks()
    if not isinstance(rows, Sequence):
        raise ConfigError(f"env.name={name}: tasks() must return a sequence such as a list; got {type(rows).__name__}")
    if not rows:
        raise ConfigError(f"env.name={name} has no tasks; check env.args")
    first_row: dict[str, int] = {}
    for row, task in enumerate(rows):
        if not isinstance(task, Task):
            raise ConfigError(f"env.name={name}: row {row} must be a Task; got {type(task).__name__}")
        if task.id in first_row:
            raise ConfigError(f"env.name={name}: rows {first_row[task.id]} and {row} have the same id {task.id!r}")
        first_row[task.id] = row
        where = f"env.name={name}: row {row} (id {task.id!r})"
        if not task.prompt:
            raise ConfigError(f"{where} has no prompt; give it at least one message")
        texts = [message.get("content") for message in task.prompt]
        if not all(isinstance(text, str) for text in texts) or not all("role" in message for message in task.prompt):
            raise ConfigError(f"{where} has a message without `role`, or whose `content` is not text")
        if not any(text.strip() for text in texts if text):
            raise ConfigError(f"{where} has an empty prompt")
    check_columns(columns or {}, rows)
    return rows


def shipped_environments() -> list[str]:
    """The folders of rlflow.envs that hold an environment: those with a config.yaml."""
    folders = [Path(path) for path in rlflow.envs.__path__]
    modules = (module.name for module in pkgutil.iter_modules(rlflow.envs.__path__) if module.ispkg)
    return sorted(name for name in modules if any((folder / name / "config.yaml").is_file() for folder in folders))


def _spec_of(config: EnvConfig) -> EnvironmentSpec:
    found = _find(config.name)
    if isinstance(found, type) and issubclass(found, Environment | Program):
        return spec_of_class(config.name, found, config.args)
    if isinstance(found, type) and callable(getattr(found, "reset", None)):
        from rlflow.envs.trl import load as load_trl

        return _loaded(config.name, partial(load_trl, found), config.args)
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"env.name={config.name} must be a function that returns an EnvironmentSpec, or a class: an Environment, a "
            f"Program, or one with a `reset` as TRL has it; got {found!r:.80}"
        )
    return _loaded(config.name, found, config.args)


def _loaded(name: str, load: Callable[..., Any], arguments: dict[str, Any]) -> EnvironmentSpec:
    check_arguments(name, [load], arguments)
    spec = load(**arguments)
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(f"env.name={name} must return an EnvironmentSpec; it returned {type(spec).__name__}")
    return spec


def _find(name: str) -> object:
    if ":" in name:
        return _load("env.name", name)
    shipped = shipped_environments()
    if name in shipped:
        return _load("env.name", f"rlflow.envs.{name}:load")
    registered = offered(ENTRY_POINTS)
    if name in registered:
        return _load(f"env.name={name}", registered[name])
    names = [*shipped, *sorted(registered)]
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"env.name={name} is not an environment; {hint}There are {', '.join(names)}; "
        "your own is package.module:Name or file.py:Name"
    )


def _is_silent(build: Callable[..., object]) -> bool:
    """Whether what is built is known to give no reward of its own."""
    from rlflow.envs.tools import ToolEnvironment

    made = build.func if isinstance(build, partial) else build
    return isinstance(made, type) and getattr(made, "step", None) in (SingleTurn.step, ToolEnvironment.step)


def _load(key: str, path: str) -> object:
    try:
        return load_object(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
