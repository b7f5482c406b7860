"""What an environment offers, in message space.

An environment is single use: built in the episode runner for one episode, played, closed. A module that ships one has a
function `load(**args) -> EnvironmentSpec`; everything in the spec must pickle, because it travels to the workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlflow.types import Message, Task

RewardFunction = Callable[[Task, str], float | None]
"""(task, last reply of the policy) -> reward, or None for "no verdict". Runs in a killable process."""


@dataclass(kw_only=True, slots=True)
class EnvironmentStep:
    """What the environment says to a reply."""

    messages: list[Message] = field(default_factory=list)
    """Shown to the policy before its next reply; empty when done."""
    done: bool = True
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(ABC):
    """One episode's world."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]:
        """The prompt."""

    @abstractmethod
    async def step(self, reply: Message) -> EnvironmentStep: ...

    async def close(self) -> None:  # noqa: B027  optional: most environments hold nothing
        """Give back what the episode held. Called exactly once, also after errors and cancellation."""


class SingleTurn(Environment):
    """The prompt is the task's prompt and the first reply ends the episode."""

    async def reset(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, reply: Message) -> EnvironmentStep:
        return EnvironmentStep(done=True)


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentSpec:
    """An environment as data: picklable, built where it is needed."""

    tasks: Callable[[], Sequence[Task]]
    """Called once, by the driver. The order and the ids must not change between runs: a resumed run counts by them."""
    build: Callable[[], Environment]
    """Called in the episode runner, once an episode."""
    reward: RewardFunction
    evaluation_tasks: Callable[[], Sequence[Task]] | None = None
    """Held out from `tasks`; needed by `eval.every` only."""
