"""What an environment offers, in message space.

Two kinds: an `Environment` is asked what it says to each reply; a `Program` has a loop of its own and speaks to an
OpenAI-compatible endpoint. Either is single use: built for one episode from a picklable spec, played, closed.
A module that ships one has a function `load(**args) -> EnvironmentSpec`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlflow.types import Json, Message, Task

ToolSchema = dict[str, Json]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""

RewardFunction = Callable[..., object]
"""In any shape that `rlflow.rewards.call` knows. Runs in a killable process."""

OwnReward = RewardFunction | Mapping[str, RewardFunction | str | None] | None
"""A function, one for each kind of task, or what the environment gives in its steps."""

POLICY = "policy"
"""The agent whose replies are passed to `step`."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """What the policy sees before its first reply.

    Example: Prompt(messages=[{"role": "user", "content": "What is 2 + 3?"}])
    """

    messages: list[Message]
    tools: list[ToolSchema] = field(default_factory=list)
    """What it may call; see `rlflow.envs.tools`."""


@dataclass(kw_only=True, slots=True)
class Step:
    """What the environment says to a reply.

    Example: Step(messages=[{"role": "user", "content": "higher"}], reward=-0.1)
    """

    messages: list[Message] = field(default_factory=list)
    """Shown to the policy before its next reply; empty when done."""
    done: bool = False
    reward: float | None = None
    """The rewards of the steps are added up; advantages of turns and tokens (`gigpo`, `gae`) see when each came. If all
    are None, the environment has no verdict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Added up over the episode's steps."""
    context: list[Message] | None = None
    """If given, it replaces everything that the policy has seen so far, except `messages`, and the episode goes on in a
    new Sample."""


class Ask(Protocol):
    """Has an agent of the episode reply to a conversation."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        agent: str,
        tools: Sequence[ToolSchema] = (),
        trainable: bool = False,
    ) -> Message:
        """The reply of the current policy in the role of `agent`. Its tokens are trained on only if `trainable`."""
        ...


class Environment(ABC):
    """One episode's world.

    Before `reset`, `seed` is set to a number that is the same for all episodes of a group, and `ask` to a way of asking
    other agents, such as a simulated user. The methods may be plain `def` instead of `async def`: then they run in a
    thread of the episode and may block, but cannot `ask`.
    """

    seed: int = 0
    ask: Ask

    @abstractmethod
    async def reset(self, task: Task) -> Prompt: ...

    @abstractmethod
    async def step(self, reply: Message) -> Step:
        """Replies that were cut off by a length limit are not shown to the environment."""

    async def close(self) -> None:  # noqa: B027  optional: most environments hold nothing
        """Give back what the episode held. Called exactly once, also after errors and cancellation."""


class SingleTurn(Environment):
    """The prompt is the task's prompt and the first reply ends the episode."""

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        return Step(done=True)


@dataclass(kw_only=True, slots=True, frozen=True)
class Endpoint:
    """Where a program finds the policy, for this episode alone."""

    base_url: str
    """For OpenAI's packages; on loopback, such as http://127.0.0.1:41234/<secret>/v1."""
    api_key: str
    """Anything will do: the secret is in the URL."""
    model: str

    @property
    def root_url(self) -> str:
        """What Anthropic's package takes as base_url: it adds /v1 itself."""
        return self.base_url.removesuffix("/v1")


@dataclass(kw_only=True, slots=True)
class Result:
    """How a program's episode went."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Program(ABC):
    """An agent with a loop of its own: it asks the policy through `endpoint`, in as many conversations as it likes.

    `run` and `close` may be plain `def`, and then run in a thread of the episode.
    """

    seed: int = 0

    @abstractmethod
    async def run(self, task: Task, endpoint: Endpoint) -> Result: ...

    async def close(self) -> None:  # noqa: B027  optional
        """As `Environment.close`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentSpec:
    """An environment as data: it is pickled and sent to the process that builds it."""

    tasks: Callable[[], Sequence[Task]]
    """Called once, by the driver. The order, the ids and the tasks themselves must not change between runs: a resumed
    run counts by the ids, and refuses tasks that were edited."""
    build: Callable[..., Environment | Program]
    """Called once an episode, in a process for environments. A required parameter named `task` is given the task, so
    that each task may have an environment of its own."""
    reward: OwnReward = None
    """None: the reward is what the environment itself gives, in its steps or its result. A mapping has one for each
    kind of task; a kind `a/b` belongs to `a`."""
    silent_kinds: tuple[str, ...] = ()
    """Kinds of tasks that nothing here gives a reward to, where `reward` is a mapping."""
    evaluation_tasks: Callable[[], Sequence[Task]] | None = None
    """Held out from `tasks`; needed by `eval.every` only."""
    expert: Callable[[Task, Sequence[Message]], str] | None = None
    """The reply of somebody who can do the task to the conversation so far; `rlflow env check` plays it. None: the
    reply is the task's answer."""
    leases: tuple[str, ...] = ()
    """Resources that one episode at a time may use, such as the addresses of sites. Each episode is given one, as the
    first argument of `build`. Empty: there is no such argument."""
    gives_replies: bool = False
    """Whether its tasks bring their replies (`Task.demonstrations`), which need no reward."""
    reply_tokens: int = 0
    """What a reply may need; `rlflow eval` warns of a smaller `rollout.max_new_tokens`. 0: nobody knows."""


def takes_task(build: Callable[..., object]) -> bool:
    """Whether what builds an environment has a required parameter named `task`."""
    try:
        parameter = inspect.signature(build).parameters.get("task")
    except (TypeError, ValueError):  # such as a class written in C
        return False
    return parameter is not None and parameter.default is parameter.empty
