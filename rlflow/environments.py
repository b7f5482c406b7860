"""Which environment `env.name` means: a shipped name, `package.module:load` or `file.py:load` -> EnvironmentSpec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.envs.base import EnvironmentSpec
from rlflow.envs.jsonl.reward import no_reward
from rlflow.errors import ConfigError
from rlflow.plugins import load_object
from rlflow.reward_call import shape_of
from rlflow.types import Task

SHIPPED = ("arithmetic", "jsonl", "latency", "python_repair")


def load_environment(config: EnvConfig, reward: RewardConfig) -> EnvironmentSpec:
    """The environment of a run; its `tasks()` checks every task.

    Raises ConfigError for an unknown name, for arguments that `load` does not take, and for a missing reward.
    """
    load = _find_load(config.name)
    _check_arguments(load, config)
    spec = load(**config.args)
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(f"env.name={config.name} must return an EnvironmentSpec; it returned {type(spec).__name__}")
    if reward.function is None and reward.model is None and spec.reward is no_reward:
        raise ConfigError(
            f"reward.function is required with env.name={config.name}, which has no reward of its own; "
            "give package.module:function or file.py:function, or a reward.model"
        )
    if reward.function is not None:
        _check_reward(reward.function)
    held_out = spec.evaluation_tasks
    return replace(
        spec,
        tasks=partial(checked_tasks, config.name, spec.tasks),
        evaluation_tasks=held_out and partial(checked_tasks, f"{config.name}, evaluation", held_out),
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


def checked_tasks(name: str, tasks: Callable[[], Sequence[Task]]) -> Sequence[Task]:
    """The tasks, or ConfigError that names the first one that cannot be used."""
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
    return rows


def _check_reward(path: str) -> None:
    """A reward that cannot be loaded or called shows before the workers start, which load it again."""
    function = _load("reward.function", path)
    if not callable(function):
        raise ConfigError(f"reward.function={path} must be a function; got {function!r:.80}")
    shape_of(function)


def _load(key: str, path: str) -> object:
    try:
        return load_object(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _find_load(name: str) -> Callable[..., Any]:
    if name not in SHIPPED and ":" not in name:
        close = get_close_matches(name, SHIPPED, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"env.name={name} is not an environment; {hint}There are {', '.join(SHIPPED)}; "
            "your own is package.module:load or file.py:load"
        )
    found = _load("env.name", f"rlflow.envs.{name}:load" if name in SHIPPED else name)
    if not callable(found):
        raise ConfigError(f"env.name={name} must be a function that returns an EnvironmentSpec; got {found!r:.80}")
    return found


def _check_arguments(load: Callable[..., Any], config: EnvConfig) -> None:
    parameters = inspect.signature(load).parameters.values()
    accepted = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in config.args:
        if name not in accepted and not takes_any:
            close = get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"env.args.{name} is not an argument of env.name={config.name}, which takes {', '.join(accepted)}{hint}"
            )
    for each in parameters:
        if each.name in accepted and each.default is each.empty and each.name not in config.args:
            raise ConfigError(f"env.args.{each.name} is required by env.name={config.name}")
