"""Typed functions as tools of the policy.

    reply with tool calls -> ToolSet.answer -> one message of role `tool` for each call -> next reply

A tool is any function with type hints and a docstring that has an `Args:` section in Google's style. Make one that
waits `async def`: plain functions run in threads, of which a process has a few only. What the model gets wrong (bad
JSON, an unknown tool, missing or unknown arguments), and what a tool raises, goes back to it as `{"error": ...}` and is
counted. A tool whose failure is not the model's doing, such as a dead server, raises `ToolBroken`: that ends the
episode in an error instead, and nothing is learnt from it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rlflow.envs.base import Environment, Prompt, Step, ToolSchema
from rlflow.envs.callables import call as call_function
from rlflow.envs.callables import name_of
from rlflow.envs.texts import json_object, text_of
from rlflow.envs.tool_schema import signature_of
from rlflow.errors import ConfigError
from rlflow.runtime.concurrency import all_or_none
from rlflow.types import Message, Task, ToolCall

Tool = Callable[..., object]


class ToolBroken(Exception):
    """Raised by a tool for a failure that is not the model's doing; the episode has no verdict."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolAnswer:
    """The outcome of one call."""

    message: Message
    is_failure: bool


class ToolSet:
    """Functions that the policy may call.

    Calls of one reply run at the same time, plain functions in threads of their own. `in_order`: one after the other,
    for functions that share state. Raises ConfigError when a function has no type hints or no docstring in the expected
    form, or when two have the same name.
    """

    def __init__(self, functions: Sequence[Tool], *, in_order: bool = False) -> None:
        self._signatures = {name_of(function): signature_of(function) for function in functions}
        self.schemas: list[ToolSchema] = [signature.schema for signature in self._signatures.values()]
        self._functions = {name_of(function): function for function in functions}
        self._in_order = in_order
        if len(self._functions) < len(functions):
            raise ConfigError(f"two tools have the same name; got {[name_of(function) for function in functions]}")

    async def answer(self, calls: Sequence[ToolCall]) -> Step:
        """The messages that answer the calls, in their order; metrics `tools/calls` and `tools/failures`.

        Raises ToolBroken when a tool says that it is broken.
        """
        if self._in_order:
            answers = [await self.call(call) for call in calls]
        else:
            answers = await all_or_none([self.call(call) for call in calls])
        failures = sum(answer.is_failure for answer in answers)
        return Step(
            messages=[answer.message for answer in answers],
            metrics={"tools/calls": float(len(answers)), "tools/failures": float(failures)},
        )

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Run one call. Raises ToolBroken only."""
        name = call["function"]["name"]
        try:
            if (function := self._functions.get(name)) is None:
                close = get_close_matches(name, self._functions, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(self._functions)}"
                raise LookupError(f"there is no tool {name}; {hint}")
            arguments = self._signatures[name].checked(json_object(call["function"]["arguments"] or "{}"))
            content, is_failure = text_of(await call_function(function, **arguments)), False
        except ToolBroken:
            raise
        except Exception as error:  # the model sees it, and may do better
            content, is_failure = json.dumps({"error": str(error) or type(error).__name__}), True
        message = Message(role="tool", content=content, tool_call_id=call["id"], name=name)
        return ToolAnswer(message=message, is_failure=is_failure)


class ToolEnvironment(Environment):
    """The task's prompt and some tools; the first reply without a tool call ends the episode.

    Give the tools to the constructor, or set `tools` in a subclass. It gives no reward: that is the reward function's.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, tools: Sequence[Tool] | ToolSet | None = None) -> None:
        chosen = self.tools if tools is None else tools
        self.tool_set = chosen if isinstance(chosen, ToolSet) else ToolSet(chosen)

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt), tools=self.tool_set.schemas)

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls")
        return await self.tool_set.answer(calls) if calls else Step(done=True)
