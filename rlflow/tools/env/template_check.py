"""Whether a model's chat template keeps what was sampled as conversations go on. Pure, apart from the tokenizer.

A template that rewrites earlier replies costs samples: the episode forks where it does, and what follows the first
change is computed once more.
"""

import json
from dataclasses import dataclass

from rlflow.errors import ConfigError
from rlflow.rollout.render import Renderer
from rlflow.rollout.tool_calls import CallStyle
from rlflow.types import FunctionCall, Json, Message, ToolCall

TURNS = 4
_TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Trial:
    """A conversation of one kind that was played through a template."""

    name: str
    turns: int
    forks: int
    """How many of the `turns` - 1 continuations fork."""
    refused: str = ""
    """What the template said, if it does not take such a conversation."""


def check_template(renderer: Renderer) -> list[Trial]:
    """Plays conversations of TURNS replies: plain, with thoughts, with tool calls, with thoughts and tool calls.

    The last kind is left out where a reply with a call holds nothing else.
    """
    is_bare = renderer.style is CallStyle.BARE
    wanted = json.dumps({"name": "add", "parameters" if is_bare else "arguments": {"a": 1, "b": 2}})
    call = wanted if is_bare else f"<tool_call>\n{wanted}\n</tool_call>"
    thought = "<think>\nI add them.\n</think>\n\n"
    trials = [
        _play(renderer, "plain", "It is 3.", is_call=False),
        _play(renderer, "thoughts", f"{thought}It is 3.", is_call=False),
        _play(renderer, "tools", call, is_call=True),
    ]
    return trials if is_bare else [*trials, _play(renderer, "thoughts and tools", f"{thought}{call}", is_call=True)]


def _play(renderer: Renderer, name: str, text: str, *, is_call: bool) -> Trial:
    tools = [_TOOL] if is_call else []
    function = FunctionCall(name="add", arguments='{"a": 1, "b": 2}')
    messages = [Message(role="user", content="What is 1 + 2?")]
    forks = 0
    try:
        prompt = renderer.prompt(messages, tools)
        for turn in range(TURNS - 1):
            held = prompt + renderer.as_sampled(text)
            reply, answer = Message(role="assistant", content=text), Message(role="user", content="And again?")
            if is_call:
                identity = f"call{turn:05}"
                reply["tool_calls"] = [ToolCall(id=identity, type="function", function=function)]
                answer = Message(role="tool", content="3", tool_call_id=identity, name="add")
            added = renderer.extend(held, [*messages, reply], [answer], tools)
            messages += [reply, answer]
            forks += added is None
            prompt = renderer.prompt(messages, tools) if added is None else held + added
    except ConfigError as error:
        return Trial(name=name, turns=TURNS, forks=forks, refused=str(error))
    return Trial(name=name, turns=TURNS, forks=forks)
