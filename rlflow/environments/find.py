"""Which environment `env.name` means -> EnvironmentSpec.

shipped name | name that an installed package registers | package.module:Name | file.py:Name
    -> function that returns a spec | Environment or Program class | TRL-style class
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rlflow.envs
from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.environments.environment_class import spec_of_class
from rlflow.envs.base import Environment, EnvironmentSpec, Program, SingleTurn
from rlflow.envs.benchmarks.env import BENCHMARKS
from rlflow.envs.tools import ToolEnvironment
from rlflow.errors import ConfigError
from rlflow.plugins.catalog import Catalog
from rlflow.plugins.options import check_options, parameters_of
from rlflow.rewards.choose import ENVIRONMENT, check_columns, choose_rewards, columns_to_check
from rlflow.rewards.models import calls_functions
from rlflow.types import Task

ENVIRONMENTS = Catalog(
    setting="env.name",
    what="an environment",
    shipped={
        module.name: f"rlflow.envs.{module.name}.env:load"
        for module in sorted(pkgutil.iter_modules(rlflow.envs.__path__))
        if any(Path(folder, module.name, "config.yaml").is_file() for folder in rlflow.envs.__path__)
    }
    | BENCHMARKS
    | {"mixture": "rlflow.environments.mixture:load"},
    group="rlflow.environments",
)


def load_environment(config: EnvConfig, reward: RewardConfig, *, needs_reward: bool = True) -> EnvironmentSpec:
    """The environment of a run; its `tasks()` checks every task.

    Raises ConfigError for an unknown name, for arguments that nothing takes, and for a missing reward.
    """
    spec = environment_of(config)
    _check_rewards_of_kinds(spec, reward)
    if needs_reward and not spec.gives_replies and has_no_reward(spec, reward):
        whose = f" for {', '.join(spec.silent_kinds)}" if spec.silent_kinds else ""
        raise ConfigError(
            f"reward.function is required with env.name={config.name}, which has no reward of its own{whose}; "
            "give package.module:function or file.py:function, or a reward.model"
        )
    # Rewards that cannot be loaded or called show before the workers start, which load them again.
    columns = columns_to_check(choose_rewards(reward, spec.reward)) if calls_functions(reward) else {}
    held_out = spec.evaluation_tasks
    return replace(
        spec,
        tasks=partial(checked_tasks, config.name, spec.tasks, columns),
        evaluation_tasks=held_out and partial(checked_tasks, f"{config.name}, evaluation", held_out, columns),
    )


def _check_rewards_of_kinds(spec: EnvironmentSpec, reward: RewardConfig) -> None:
    """Raise ConfigError for a reward that was named for one kind of tasks, and does not count."""
    rewards = spec.reward if isinstance(spec.reward, Mapping) else {}
    named = [kind for kind, each in rewards.items() if isinstance(each, str)]
    functions = [reward.function] if isinstance(reward.function, str) else reward.function
    counts = reward.model is None if functions is None else ENVIRONMENT in functions
    if named and not counts:
        raise ConfigError(
            f"the reward of {named[0]} has no effect, because reward.function and reward.model leave the rewards of "
            "the environment out; add `environment` to reward.function, or leave it out"
        )


def has_no_reward(spec: EnvironmentSpec, reward: RewardConfig) -> bool:
    """Whether it is known before anything is played that nothing gives a reward, at least for some kinds of tasks."""
    if spec.silent_kinds and reward.model is None and reward.function in (None, ENVIRONMENT, [ENVIRONMENT]):
        return True
    return reward.function is None and reward.model is None and spec.reward is None and is_silent(spec.build)


def is_silent(build: Callable[[], object]) -> bool:
    """Whether what an EnvironmentSpec builds is known to give no reward in its steps."""
    made = build.func if isinstance(build, partial) else build
    return isinstance(made, type) and getattr(made, "step", None) in (SingleTurn.step, ToolEnvironment.step)


def held_out_tasks(config: Config, spec: EnvironmentSpec) -> Sequence[Task]:
    """What `eval.every` plays, nothing when that is 0; ConfigError when the environment has nothing to play."""
    if not config.eval.every:
        return ()
    if spec.evaluation_tasks is None:
        raise ConfigError(
            f"eval.every is {config.eval.every}, but env.name={config.env.name} with these env.args has no evaluation "
            "tasks; give it some (`evaluation_tasks` of its EnvironmentSpec), or set eval.every to 0"
        )
    if has_no_reward(spec, config.reward):
        raise ConfigError(
            f"eval.every is {config.eval.every}, but env.name={config.env.name} has no reward of its own to evaluate "
            "with; give a reward.function, which is only shown, or set eval.every to 0"
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
        if any("\ud800" <= character <= "\udfff" for character in task.id):
            raise ConfigError(f"{where} has half a character in its id, which no file can hold; give it another id")
        if not task.prompt:
            raise ConfigError(f"{where} has no prompt; give it at least one message")
        texts = [message.get("content") for message in task.prompt]
        if not all(isinstance(text, str) for text in texts) or not all("role" in message for message in task.prompt):
            raise ConfigError(f"{where} has a message without `role`, or whose `content` is not text")
        if not any(text.strip() for text in texts if text):
            raise ConfigError(f"{where} has an empty prompt")
    check_columns(columns or {}, rows)
    return rows


def environment_of(config: EnvConfig) -> EnvironmentSpec:
    """What `env.name` stands for, before its tasks and a reward are asked for. Raises ConfigError."""
    load = ENVIRONMENTS.find(config.name)
    if isinstance(load, type) and issubclass(load, Environment | Program):
        return spec_of_class(config.name, load, config.args)
    if isinstance(load, type) and any(base.__module__.split(".")[0] in ("gymnasium", "gym") for base in load.__mro__):
        raise ConfigError(
            f"env.name={config.name} is a Gymnasium environment; play it with env.name=gymnasium "
            f"env.args.environment={config.name}"
        )
    if isinstance(load, type) and callable(getattr(load, "reset", None)):
        from rlflow.envs.trl.env import load as load_trl

        load = partial(load_trl, load)
    elif isinstance(load, type) or not callable(load):
        raise ConfigError(
            f"env.name={config.name} must be a function that returns an EnvironmentSpec, or a class: an Environment, a "
            f"Program, or one with a `reset` as TRL has it; got {load!r:.80}"
        )
    check_options(config.args, parameters_of(load), "env.args", f"env.name={config.name}")
    spec: Any = load(**config.args)
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(f"env.name={config.name} must return an EnvironmentSpec; it returned {type(spec).__name__}")
    return spec
