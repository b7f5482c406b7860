"""Tool calls in the text that a model samples. Pure.

Two ways of writing them are known. `tagged`, of Qwen, Hermes and most others:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

and `bare`, of Llama 3: the reply is the object {"name": ..., "parameters": ...} and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum

from rlflow.types import FunctionCall, Json, Message

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

INSTRUCTIONS = """# Tools

You may call functions. Their signatures, as JSON:
{schemas}

To call one, reply with its name and its arguments as one JSON object between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


class CallStyle(StrEnum):
    """How a model writes its calls."""

    TAGGED = "tagged"
    BARE = "bare"


def find_calls(text: str, style: CallStyle) -> list[FunctionCall]:
    """The calls in a reply, in order.

    What stands where a call should be, but is none, is a call without a name whose arguments are the text as it is: who
    runs the call can then say what is wrong with it.

    Example: find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', CallStyle.TAGGED)
             == [{"name": "f", "arguments": '{"x": 1}'}]
    """
    if style is CallStyle.TAGGED:
        return [_call_of(found.strip()) for found in _TAGGED.findall(text)]
    stripped = text.strip()
    return [_call_of(stripped)] if stripped.startswith("{") and '"name"' in stripped else []


def without_calls(text: str, style: CallStyle) -> str:
    """What a reply says beside its calls."""
    if style is CallStyle.TAGGED:
        return _TAGGED.sub("", text).strip()
    return "" if find_calls(text, style) else text


def describe_tools(messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[Message]:
    """The conversation with the tools described in its system message, for models whose template takes no tools."""
    described = INSTRUCTIONS.format(schemas="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0]["role"] == "system":
        system = Message(role="system", content=f"{messages[0]['content']}\n\n{described}")
        return [system, *messages[1:]]
    return [Message(role="system", content=described), *messages]


def tools_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation in the roles user and assistant alone, for models whose template knows no tools.

    Calls become tagged text, and what the tools answered in a row becomes one message of the user.
    """
    converted: list[Message] = []
    follows_answer = False
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_answer:
                answer = f"{converted.pop()['content']}\n{answer}"
            converted.append(Message(role="user", content=answer))
        else:
            calls = [_tagged(call["function"]) for call in message.get("tool_calls", [])]
            content = "\n".join(part for part in (message["content"], *calls) if part)
            converted.append(Message(role=message["role"], content=content))
        follows_answer = message["role"] == "tool"
    return converted


def _tagged(call: FunctionCall) -> str:
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        arguments = call["arguments"]
    return f"<tool_call>\n{json.dumps({'name': call['name'], 'arguments': arguments})}\n</tool_call>"


def _call_of(text: str) -> FunctionCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # also for a number with too many digits
        return FunctionCall(name="", arguments=text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return FunctionCall(name="", arguments=text)
    arguments = found.get("arguments", found.get("parameters", {}))
    return FunctionCall(
        name=found["name"], arguments=arguments if isinstance(arguments, str) else json.dumps(arguments)
    )
