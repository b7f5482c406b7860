"""A Gymnasium environment played in words: observation -> text -> reply -> action -> observation.

Its calls run in a thread. The reward of an episode is the sum of Gymnasium's rewards; a reply that is no action gets a
message back, costs nothing and earns nothing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.callables import load_callable
from rlflow.envs.extras import need
from rlflow.envs.gymnasium.spaces import instructions_for, observation_text, parser_of
from rlflow.envs.seeds import seeded_tasks, variant_tasks
from rlflow.envs.texts import answer_part, prompt_of, with_observation
from rlflow.errors import ConfigError
from rlflow.types import Json, Message, Task


@dataclass(kw_only=True, slots=True, frozen=True)
class World:
    """Which environment, and its words."""

    id: str | None
    environment: str | None
    options: dict[str, Any] = field(default_factory=dict)
    observation_to_text: str | None = None
    action_parser: str | None = None

    @property
    def name(self) -> str:
        return self.id or (self.environment or "").rpartition(":")[2]

    def make(self, options: Mapping[str, Any]) -> Any:
        chosen = {**self.options, **options}
        if self.environment is not None:
            return load_callable("environment", self.environment)(**chosen)
        return need("gymnasium", "gymnasium").make(self.id, **chosen)

    def parser(self, space: Any) -> Callable[[Message], object]:
        """What turns a reply into an action of `space`; it raises ValueError for a reply that is no action."""
        if self.action_parser is None:
            return parser_of(space)
        parse = load_callable("action_parser", self.action_parser)
        return lambda reply: parse(answer_part(reply))


def load(
    id: str | None = None,
    environment: str | None = None,
    options: Mapping[str, Any] | None = None,
    variants: Sequence[Mapping[str, Json]] = (),
    instructions: str | None = None,
    system_prompt: str = "",
    observation_to_text: str | None = None,
    action_parser: str | None = None,
    size: int = 1000,
    seed: int = 0,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """One Gymnasium environment; a task is a seed of it.

    id: as gymnasium.make takes it, such as FrozenLake-v1 or your_package:Your-v0; or
    environment: a class or function that makes one, as package.module:Name or file.py:Name.
    options: keyword arguments for making it; variants: further ones that tasks take in turn, such as {task_id: "3"}.
    instructions: shown before the first observation; None says what actions there are.
    observation_to_text: path of a function from an observation to a text; None: the observation, and its drawing.
    action_parser: path of a function from the reply's text to an action, which raises ValueError for what is none;
        None: the last whole number or numbers, or the whole text after </think>, as the action space has it.
    size, seed: how many tasks, and which; evaluation_size: number of tasks for `eval.every`, from other seeds.
    """
    if (id is None) == (environment is None):
        raise ConfigError("env.args of gymnasium need one of `id` and `environment`")
    world = World(
        id=id,
        environment=environment,
        options=dict(options or {}),
        observation_to_text=observation_to_text,
        action_parser=action_parser,
    )
    world, told = _try_out(world, variants[0] if variants else {})
    prompt = prompt_of(system_prompt, told if instructions is None else instructions)
    make = partial(variant_tasks, world.name, prompt, "options", [dict(each) for each in variants])
    tasks, evaluation_tasks = seeded_tasks(make, size, seed, evaluation_size)
    return EnvironmentSpec(tasks=tasks, build=partial(GymnasiumEnvironment, world), evaluation_tasks=evaluation_tasks)


class GymnasiumEnvironment(Environment):
    """One episode of a Gymnasium environment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env: Any = None
        self._parse: Callable[[Message], object]

    async def reset(self, task: Task) -> Prompt:
        observation = await asyncio.to_thread(self._open, task)
        return Prompt(messages=with_observation(task.prompt, observation))

    async def step(self, reply: Message) -> Step:
        return await asyncio.to_thread(self._act, reply)

    async def close(self) -> None:
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    def _open(self, task: Task) -> str:
        options, seed = task.data["options"], task.data["seed"]
        assert isinstance(options, dict) and isinstance(seed, int)
        self._env = self._world.make(options)
        self._parse = self._world.parser(self._env.action_space)
        observation, _ = self._env.reset(seed=seed)
        return self._text(observation)

    def _act(self, reply: Message) -> Step:
        try:
            action = self._parse(reply)
        except ValueError as error:
            answer = Message(role="user", content=str(error) or "Your reply is not an action.")
            return Step(messages=[answer], reward=0.0, metrics={"gymnasium/not_an_action": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        is_done = bool(terminated or truncated)
        return Step(
            messages=[] if is_done else [Message(role="user", content=self._text(observation))],
            done=is_done,
            reward=float(reward),
            metrics={"gymnasium/actions": 1.0, "gymnasium/truncated": float(bool(truncated))},
        )

    def _text(self, observation: object) -> str:
        if self._world.observation_to_text is not None:
            return str(load_callable("observation_to_text", self._world.observation_to_text)(observation))
        drawing = self._env.render() if getattr(self._env, "render_mode", None) == "ansi" else None
        return observation_text(observation, drawing)


def _try_out(world: World, options: Mapping[str, Any]) -> tuple[World, str]:
    """Make the environment once, so that what is wrong shows now. The world, and instructions for it.

    An environment that can draw itself in text will do so, unless its observations have words of their own.
    """
    gymnasium = need("gymnasium", "gymnasium")
    try:
        env = world.make(options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"env.name=gymnasium: cannot make {world.name}: {error}") from error
    try:
        world.parser(env.action_space)
        draws = "ansi" in (env.metadata or {}).get("render_modes", ())
        if draws and world.id is not None and world.observation_to_text is None:
            world = replace(world, options={"render_mode": "ansi", **world.options})
        return world, instructions_for(world.name, env.action_space)
    finally:
        env.close()
