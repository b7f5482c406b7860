"""Several environments in one run (`env.name=mixture`): each has its own tasks, worlds and reward.

    env.args.environments={sums: {name: arithmetic}, guess: {name: guess_number, args: {highest: 20}}}

Task "sums/<id>" has kind "sums", or "sums/<kind>" if the environment gives it a kind. `build` and rewards go by that.
With `path`, the tasks are the rows of one file, and a column of each names its environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from rlflow.config import EnvConfig
from rlflow.environments.environment_class import build_of_class
from rlflow.environments.find import ENVIRONMENTS, environment_of, is_silent
from rlflow.envs.base import Environment, EnvironmentSpec, Program, takes_task
from rlflow.envs.dataset.env import load as load_rows
from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean
from rlflow.plugins.options import parameters_of
from rlflow.rewards.choose import REWARDS
from rlflow.types import Message, Task

_SETTING = "env.args.environments"

MakeTasks = Callable[[], Sequence[Task]]


def load(
    environments: Mapping[str, Any],
    path: str | None = None,
    evaluation_path: str | None = None,
    column: str = "env_class",
) -> EnvironmentSpec:
    """The environments together.

    environments: name of your own -> {name: as env.name, args: as env.args, reward: as reward.function}. Only `name`
        is needed; without `reward` the environment's own one counts.
    path: rows as `rlflow.envs.dataset` reads them; null takes the tasks of each environment.
    evaluation_path: as `path`, for `eval.every`.
    column: of a row, the name of its environment.

    Raises ConfigError for an environment that cannot be loaded, has leases or brings its own replies.
    """
    if not environments:
        raise ConfigError(f"{_SETTING} is empty; give it at least one environment as NAME: {{name: ...}}")
    members = {name: _member(name, given, path) for name, given in environments.items()}
    specs = {name: member.spec for name, member in members.items()}
    silent = tuple(name for name, member in members.items() if member.is_silent)
    if path is not None:
        rows = load_rows(path=path, evaluation_path=evaluation_path)
        tasks: MakeTasks = partial(_of_rows, rows.tasks, tuple(members), column)
        held_out = rows.evaluation_tasks and partial(_of_rows, rows.evaluation_tasks, tuple(members), column)
    else:
        if evaluation_path is not None:
            raise ConfigError("env.args.evaluation_path has no effect without env.args.path")
        tasks = partial(_of_members, {name: spec.tasks for name, spec in specs.items()})
        evaluations = {name: spec.evaluation_tasks for name, spec in specs.items() if spec.evaluation_tasks}
        held_out = partial(_of_members, evaluations) if evaluations else None
    return EnvironmentSpec(
        tasks=tasks,
        build=partial(build_member, {name: spec.build for name, spec in specs.items()}),
        reward={name: member.reward for name, member in members.items() if not member.is_silent},
        silent_kinds=silent,
        evaluation_tasks=held_out,
        expert=partial(_expert, {name: spec.expert for name, spec in specs.items()}),
        reply_tokens=max(spec.reply_tokens for spec in specs.values()),
    )


def build_member(builds: Mapping[str, Callable[..., Environment | Program]], *, task: Task) -> Environment | Program:
    """The world of the environment that the task belongs to."""
    build = builds[name_of(task)]
    return build(task=task) if takes_task(build) else build()


def name_of(task: Task) -> str:
    """The environment that a task of a mixture belongs to."""
    return task.kind.partition("/")[0]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Member:
    spec: EnvironmentSpec
    reward: Any
    is_silent: bool
    """Whether it gives no reward, and none was named for it."""


def _member(name: str, given: object, rows: str | None) -> _Member:
    where = f"{_SETTING}.{name}"
    if not name or "/" in name:
        raise ConfigError(f"{_SETTING} has the name {name!r}; give a name without a slash")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(f"{where} must be {{name: as env.name, args: ..., reward: ...}}; got {given!r:.80}")
    known = ("name", "args", "reward")
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}.{key} has no effect{did_you_mean(key, known)}; it takes {', '.join(known)}")
    args, reward = given.get("args") or {}, given.get("reward")
    if not isinstance(args, Mapping) or not isinstance(reward, str | None):
        raise ConfigError(f"{where}: `args` must be arguments as name: value, and `reward` a name; got {given!r:.80}")
    try:
        spec = _spec(EnvConfig(name=given["name"], args=dict(args)), rows)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if spec.leases or spec.gives_replies or isinstance(spec.reward, Mapping):
        what = "has leases" if spec.leases else "brings its replies" if spec.gives_replies else "is a mixture itself"
        raise ConfigError(f"{where}: {given['name']} {what}, which a mixture cannot have; train on it alone")
    return _Member(
        spec=spec,
        reward=spec.reward if reward is None else REWARDS.path_of(reward),
        is_silent=reward is None and spec.reward is None and is_silent(spec.build),
    )


def _spec(config: EnvConfig, rows: str | None) -> EnvironmentSpec:
    """What the name stands for. Where the tasks are `rows`, it needs none of its own, and no `path` to them."""
    found = ENVIRONMENTS.find(config.name)
    if rows is None or not callable(found):
        return environment_of(config)
    if isinstance(found, type) and issubclass(found, Environment | Program):
        return EnvironmentSpec(tasks=list, build=build_of_class(config.name, found, config.args))
    takes_path = any(each.name == "path" for each in parameters_of(found))
    return environment_of(replace(config, args={"path": rows, **config.args}) if takes_path else config)


def _of_members(makers: Mapping[str, MakeTasks]) -> Sequence[Task]:
    return list(chain.from_iterable(_named(name, make()) for name, make in makers.items()))


def _of_rows(rows: MakeTasks, names: Sequence[str], column: str) -> Sequence[Task]:
    tasks = rows()
    found: list[Task] = []
    for number, task in enumerate(tasks):
        name = task.data.get(column)
        if not isinstance(name, str) or name not in names:
            raise ConfigError(
                f"env.args.path: row {number} (id {task.id!r}) must name its environment in the column {column!r}, "
                f"one of {', '.join(names)}; got {name!r:.80}"
            )
        found += _named(name, [task])
    return found


def _named(name: str, tasks: Sequence[Task]) -> Sequence[Task]:
    return [
        replace(task, id=f"{name}/{task.id}", kind=name if task.kind in ("", name) else f"{name}/{task.kind}")
        for task in tasks
    ]


def _expert(
    experts: Mapping[str, Callable[[Task, Sequence[Message]], str] | None], task: Task, messages: Sequence[Message]
) -> str:
    """Where an environment has no expert, the task's answer."""
    expert = experts[name_of(task)]
    if expert is None:
        return "" if task.answer is None else str(task.answer)
    return expert(task, messages)
