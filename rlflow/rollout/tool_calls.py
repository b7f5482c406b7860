"""Tool calls in the text that a model samples. Pure.

Models write them in two ways. `tagged` is the way of Qwen, Hermes and most others:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

and `bare` is Llama 3's: the reply is the object {"name": ..., "parameters": ...} and nothing else.
"""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

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

    Text that stands where a call should be, but is none, becomes a call without a name whose arguments are that text,
    so that the environment can say what is wrong with it.

    Example: find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', CallStyle.TAGGED)
             == [{"name": "f", "arguments": '{"x": 1}'}]
    """
    if style is CallStyle.TAGGED:
        return [_call_of(found.strip()) for found in _TAGGED.findall(text)]
    stripped = text.strip()
    return [_call_of(stripped)] if stripped.startswith("{") and '"name"' in stripped else []


def without_calls(text: str, style: CallStyle) -> str:
    """The text of a reply without its calls."""
    if style is CallStyle.TAGGED:
        return _TAGGED.sub("", text).strip()
    return "" if find_calls(text, style) else text


def describe_tools(messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[Message]:
    """The conversation with the tools described in its system message, if the model's template takes no tools."""
    described = INSTRUCTIONS.format(schemas="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0]["role"] == "system":
        system = Message(role="system", content=f"{messages[0]['content']}\n\n{described}")
        return [system, *messages[1:]]
    return [Message(role="system", content=described), *messages]


def tools_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation without the role tool, if the model's template does not know it.

    Calls become tagged text, and successive answers of tools become one message of the user.
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
            calls = [call["function"] for call in message.get("tool_calls", [])]
            written = [json.dumps({"name": call["name"], "arguments": arguments_of(call)}) for call in calls]
            tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in written]
            content = "\n".join(part for part in (message["content"], *tagged) if part)
            shown = Message(role=message["role"], content=content)
            if "parts" in message:
                shown["parts"] = message["parts"]
            converted.append(shown)
        follows_answer = message["role"] == "tool"
    return converted


def arguments_of(call: FunctionCall) -> Any:
    """A call's arguments as JSON values; the text itself if it is not JSON."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _call_of(text: str) -> FunctionCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # ValueError is also raised for a number with too many digits
        return FunctionCall(name="", arguments=text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return FunctionCall(name="", arguments=text)
    arguments = found.get("arguments", found.get("parameters", {}))
    return FunctionCall(
        name=found["name"], arguments=arguments if isinstance(arguments, str) else json.dumps(arguments)
    )
