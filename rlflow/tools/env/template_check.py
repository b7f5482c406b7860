"""Whether a model's chat template keeps what was sampled as conversations go on. Pure, apart from the tokenizer.

A template that rewrites earlier replies costs samples: the episode forks where it does, and what follows the first
change is computed once more.
"""

from dataclasses import dataclass

from rlflow.errors import ConfigError
from rlflow.rollout.chat_template import PROBE_CALL, PROBE_TOOL
from rlflow.rollout.render import Renderer
from rlflow.rollout.tool_syntax import CallStyle
from rlflow.types import Message, ToolCall

TURNS = 4


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
    syntax, call = renderer.tool_support.syntax, renderer.probe_call()
    is_bare = syntax is not None and syntax.style is CallStyle.BARE
    opens = "" if renderer.begins_thoughts else "<think>\n"  # the prompt may hold it
    thought = f"{opens}I add them.\n</think>\n\n"
    trials = [
        _play(renderer, "plain", "It is 3.", is_call=False),
        _play(renderer, "thoughts", f"{thought}It is 3.", is_call=False),
        _play(renderer, "tools", call, is_call=True),
    ]
    return trials if is_bare else [*trials, _play(renderer, "thoughts and tools", f"{thought}{call}", is_call=True)]


def _play(renderer: Renderer, name: str, text: str, *, is_call: bool) -> Trial:
    tools = [PROBE_TOOL] if is_call else []
    messages = [Message(role="user", content="What is 1 + 2?")]
    forks = 0
    try:
        prompt = renderer.prompt(messages, tools)
        for turn in range(TURNS - 1):
            held = prompt + renderer.as_sampled(text)
            reply, answer = Message(role="assistant", content=text), Message(role="user", content="And again?")
            if is_call:
                identity = f"call{turn:05}"
                reply["tool_calls"] = [ToolCall(id=identity, type="function", function=PROBE_CALL)]
                answer = Message(role="tool", content="3", tool_call_id=identity, name=PROBE_CALL["name"])
            added = renderer.extend(held, [*messages, reply], [answer], tools)
            messages += [reply, answer]
            forks += added is None
            prompt = renderer.prompt(messages, tools) if added is None else held + added
    except ConfigError as error:
        return Trial(name=name, turns=TURNS, forks=forks, refused=str(error))
    return Trial(name=name, turns=TURNS, forks=forks)
