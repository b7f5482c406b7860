"""Playing an environment in message space, with replies that a function makes up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Program, Prompt
from rlflow.types import Message, Task, ToolCall

Policy = Callable[[Sequence[Message]], str | Message]


@dataclass(kw_only=True, slots=True)
class Episode:
    prompt: Prompt
    messages: list[Message]
    reward: float | None = None
    is_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def call(name: str, arguments: dict[str, Any] | str, number: int = 0) -> ToolCall:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=f"call_{number}", type="function", function={"name": name, "arguments": written})


def calling(*calls: ToolCall) -> Message:
    return Message(role="assistant", content="", tool_calls=list(calls))


async def play(spec: EnvironmentSpec, task: Task, policy: Policy, *, max_turns: int = 50, lease: str = "") -> Episode:
    """One episode; it is closed whatever happens."""
    environment = spec.build(lease) if spec.leases else spec.build()  # pyright: ignore[reportCallIssue]
    assert isinstance(environment, Environment) and not isinstance(environment, Program)
    try:
        prompt = await environment.reset(task)
        episode = Episode(prompt=prompt, messages=list(prompt.messages))
        while not episode.is_done and max_turns > 0:
            max_turns -= 1
            reply = policy(episode.messages)
            episode.messages.append(say(reply) if isinstance(reply, str) else reply)
            step = await environment.step(episode.messages[-1])
            episode.messages += step.messages
            episode.is_done = step.done
            assert step.messages or step.done, "an environment that goes on has something to say"
            if step.reward is not None:
                episode.reward = (episode.reward or 0.0) + step.reward
            for name, value in step.metrics.items():
                episode.metrics[name] = episode.metrics.get(name, 0.0) + value
        return episode
    finally:
        await environment.close()
