"""`rlflow chat RUN|CHECKPOINT|MODEL [env.name=NAME] [key=value ...]`: a conversation in the terminal.

    what a person types -> the model's reply -> its tool calls -> what the tools say -> reply ... -> the answer

Messages become tokens, and replies tool calls, as in rollouts (`rlflow.rollout.render`). The tools are those of the
environment that env.name gives; they run in its process, under its deadlines (`rlflow.environments.pool`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import httpx

from rlflow.config import EnvConfig
from rlflow.environments.find import checked_tasks, environment_of
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, Program, Prompt, Step, ToolSchema
from rlflow.errors import ConfigError, DeadlineError, EnvironmentFailure, RunError
from rlflow.rollout.episode import shortened
from rlflow.rollout.render import ChatRenderer, ToolSchemas, open_renderer
from rlflow.runtime.deadlines import within
from rlflow.telemetry.text import printable
from rlflow.tools.serve import add_target
from rlflow.tools.server import Server, serving
from rlflow.tools.target import find_target
from rlflow.types import Message, Task, ToolCall

Reply: TypeAlias = Callable[[Sequence[Message], ToolSchemas], tuple[Message, bool]]
"""Conversation, tools -> the model's reply, and whether it is whole rather than ended early or cut off."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="what stands before the conversation")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy; 1 by default")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of a reply; by default what fits the context")
    parser.epilog = "env.name=NAME: with that environment's tools. Ctrl-C ends a reply or a tool, Ctrl-D the chat."


def run(options: argparse.Namespace) -> int:
    target = find_target(options.target, options.step, options.words)
    is_named = any(word.startswith("env.name=") for word in options.words)
    with tools_of(target.config.env) if is_named else nullcontext() as tools:
        messages = [] if tools is None else tools.begin()
        if options.system is not None:
            messages = [Message(role="system", content=options.system), *(m for m in messages if m["role"] != "system")]
        print(f"loading {target.name} ...", flush=True)
        with serving(target, port=None) as server:
            renderer = open_renderer(target.config, server.model)
            print("Ctrl-C ends a reply, Ctrl-D the chat", flush=True)
            while (question := _ask()) is not None:
                if question.strip():
                    messages.append(Message(role="user", content=question))
                    reply = partial(_reply, server, renderer, options)
                    converse(messages, reply, tools) if tools else messages.append(reply(messages, ())[0])
    return 0


def converse(messages: list[Message], reply: Reply, tools: Tools) -> None:
    """Add the model's reply to `messages`, and as long as it calls tools what these say, and its next reply.

    As in a rollout a reply that is not whole is never acted on, and there are at most `env.max_turns`.
    """
    tools.begin()
    for _ in range(tools.limits.max_turns):
        said, is_whole = reply(messages, tools.schemas)
        messages.append(said)
        if not is_whole or "tool_calls" not in said:
            return
        step = tools.answer(said)
        messages[:] = messages if step.context is None else step.context
        for message in step.messages:
            text = shortened(message["content"], tools.limits.max_observation_chars)
            print(printable(f"[{message.get('name', message['role'])}] {text}"), flush=True)
            messages.append(Message(**{**message, "content": text}))
        if step.done:
            return
    print(f"[env.max_turns: no more than {tools.limits.max_turns} replies to a question]", flush=True)


@contextmanager
def tools_of(limits: EnvConfig) -> Iterator[Tools]:
    """The tools of env.name, whose process ends with the block. Raises ConfigError."""
    spec = environment_of(limits)
    task, pool = checked_tasks(limits.name, spec.tasks)[0], EnvironmentPool(spec.build, 1, spec.leases)
    with asyncio.Runner() as runner:
        try:
            yield Tools(limits=limits, task=task, build=pool.open, runner=runner)
        finally:
            runner.run(pool.close())


@dataclass(kw_only=True, slots=True)
class Tools:
    """An environment that was begun with `task`, for the calls of the model. Ctrl-C ends a call.

    When the environment is done or fails, or a call was ended, the next question begins a new one.
    """

    limits: EnvConfig
    task: Task
    build: Callable[[int, Task], Awaitable[Environment | Program]]
    """Takes the environment's seed and its task."""
    runner: asyncio.Runner
    schemas: list[ToolSchema] = field(default_factory=list)
    world: Environment | None = None

    def begin(self) -> list[Message]:
        """What the environment says before its question, such as a system prompt; nothing if it has begun.

        Raises RunError when it cannot begin, ConfigError when it is a program.
        """
        if self.world is not None:
            return []
        try:
            prompt = self.runner.run(within("env.setup_timeout_s", self.limits.setup_timeout_s, self._begin()))
        except EnvironmentFailure as error:
            raise RunError(f"env.name={self.limits.name}: {error}") from error
        self.schemas, names = prompt.tools, (str(each["function"]["name"]) for each in prompt.tools)  # pyright: ignore
        print(f"tools of {self.limits.name}: {', '.join(names) or 'none'}", flush=True)
        users = [index for index, each in enumerate(prompt.messages) if each["role"] == "user"]
        return prompt.messages[: users[-1] if users else None]

    async def _begin(self) -> Prompt:
        world = await self.build(0, self.task)
        if isinstance(world, Program):
            raise ConfigError(f"env.name={self.limits.name} is a program, which keeps its tools; name an Environment")
        world.ask, self.world = _nobody, world
        return await world.reset(self.task)

    def answer(self, reply: Message) -> Step:
        """What the environment says to a reply with calls; done without a word when it fails or is ended."""
        assert self.world is not None, "begin first"
        try:
            step = self.runner.run(within("a call", self.limits.step_timeout_s, self.world.step(reply)))
        except (EnvironmentFailure, DeadlineError, KeyboardInterrupt) as error:
            print(printable(f"[{str(error) or 'ended'}; the next question begins the environment anew]"), flush=True)
            step = Step(done=True)
        if step.done:
            with suppress(EnvironmentFailure, DeadlineError):
                self.runner.run(within("close", self.limits.setup_timeout_s, self.world.close()))
            self.world = None
        return step


async def _nobody(messages: Sequence[Message], *, agent: str, **others: object) -> Message:
    raise EnvironmentFailure(f"it asks the agent {agent}, and nobody else is in a chat")


def _ask() -> str | None:
    """What the person types; None at its end."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def _reply(
    server: Server, renderer: ChatRenderer, options: argparse.Namespace, messages: Sequence[Message], tools: ToolSchemas
) -> tuple[Message, bool]:
    """A Reply, printed as it comes until its end or Ctrl-C. Raises RunError when the model cannot reply."""
    prompt = renderer.prompt(messages, tools)
    room = server.context - len(prompt)
    if room < 1:
        raise RunError(f"the conversation fills the model's context of {server.context} tokens; begin again")
    body = {"model": server.name, "prompt": prompt, "stream": True, "temperature": options.temperature}
    body["max_tokens"] = min(room, options.max_tokens or room)
    said, end = "", None
    try:
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                raise RunError(f"the model cannot answer: {answer.read().decode(errors='replace')}")
            for line in answer.iter_lines():
                event = line.removeprefix("data: ")
                if event and event != "[DONE]":
                    if not (choices := json.loads(event).get("choices")):
                        raise RunError(f"the model cannot answer: {event}")
                    (choice,) = choices
                    said, end = said + choice["text"], choice["finish_reason"]
                    print(printable(choice["text"]), end="", flush=True)
    except httpx.TransportError as error:
        raise RunError(f"the model's process has ended ({error}); begin again") from error
    except KeyboardInterrupt:
        print(" [ended]", end="")
    print(" [cut off]" if end == "length" else "")
    message, is_whole = Message(role="assistant", content=said), end == "stop"
    if calls := renderer.calls(said) if tools and is_whole else []:
        numbered = ((f"call_{len(messages)}_{index}", call) for index, call in enumerate(calls))
        message["tool_calls"] = [ToolCall(id=name, type="function", function=call) for name, call in numbered]
    return message, is_whole
