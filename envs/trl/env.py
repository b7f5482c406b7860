"""A TRL-style class: `reset(**row)`, public methods as tools, and optionally `get_reward`.

The conventions are those of `environment_factory` of TRL's GRPOTrainer. `close` is an addition.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

from rlflow.envs.base import EnvironmentSpec, Prompt, Step
from rlflow.envs.callables import call, name_of
from rlflow.envs.dataset.env import load as load_rows
from rlflow.envs.texts import with_observation
from rlflow.envs.tools import ToolEnvironment, ToolSet
from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object
from rlflow.types import Message, Task

NOT_TOOLS = ("reset", "get_reward", "close")


def load(
    environment: str | Callable[[], Any], path: str, system_prompt: str = "", evaluation_path: str | None = None
) -> EnvironmentSpec:
    """Rows, played in objects that `environment` makes.

    environment: a class or a function without arguments, or its path as package.module:Name or file.py:Name.
    path, system_prompt, evaluation_path: as in `rlflow.envs.dataset`.
    """
    make = load_object(environment) if isinstance(environment, str) else environment
    if not callable(make):
        raise ConfigError(f"env.args.environment={environment} must be a class or a function; got {make!r:.80}")
    # What can be seen without making one:
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(f"{name_of(make)}: TRL makes its environments without arguments; {error}") from error
    if isinstance(make, type):
        if not callable(getattr(make, "reset", None)):
            raise ConfigError(f"{name_of(make)} has no method `reset`; TRL's environments have one")
        # Bound to any object, because they are not called.
        ToolSet([MethodType(getattr(make, name), object()) for name in _tool_names(make)])
    rows = load_rows(path=path, system_prompt=system_prompt, evaluation_path=evaluation_path)
    # A class without `get_reward` is known to give none, so that the run asks for a reward function before it starts.
    is_silent = isinstance(make, type) and not hasattr(make, "get_reward")
    return replace(rows, build=partial(TrlEnvironment if is_silent else RewardingTrlEnvironment, make), reward=None)


class TrlEnvironment(ToolEnvironment):
    """One object of the user's class; its plain methods run in a thread, one at a time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._world = make()
        tools = [getattr(self._world, name) for name in _tool_names(type(self._world))]
        super().__init__(ToolSet(tools, in_order=True))

    async def reset(self, task: Task) -> Prompt:
        row: dict[str, object] = {**task.data, "prompt": [dict(message) for message in task.prompt]}
        if task.answer is not None:
            row["answer"] = task.answer
        observation = await call(self._world.reset, **row)
        if observation is not None and not isinstance(observation, str):
            raise TypeError(f"reset must return a text or None; got {type(observation).__name__}")
        return Prompt(messages=with_observation(task.prompt, observation or ""), tools=self.tool_set.schemas)

    async def close(self) -> None:
        if hasattr(self._world, "close"):
            await call(self._world.close)


class RewardingTrlEnvironment(TrlEnvironment):
    """Asks `get_reward`, if there is one, once the policy has no more calls to make."""

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        if step.done and hasattr(self._world, "get_reward"):
            reward = await call(self._world.get_reward)
            step.reward = None if reward is None else float(reward)
        return step


def _tool_names(kind: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in names if name not in NOT_TOOLS and not name.startswith("_")]
