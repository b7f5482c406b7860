"""Tool calls in the text that a model samples, in the styles that need no parser of vLLM. Pure.

tagged      <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
bare        {"name": "add", "parameters": {"a": 1, "b": 2}}
harmony     <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.rollout.tool_syntax import SYNTAXES, CallStyle
from rlflow.types import FunctionCall, Json, Message, ToolCall

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>")

INSTRUCTIONS = """# Tools

You may call functions. Their signatures, as JSON:
{schemas}

To call one, reply with its name and its arguments as one JSON object between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def find_calls(text: str, style: CallStyle) -> list[FunctionCall]:
    """The calls in a reply, in order.

    Text that stands where a call should be, but is none, becomes a call without a name whose arguments are that text,
    so that the environment can say what is wrong with it.

    Example: find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', CallStyle.TAGGED)
             == [{"name": "f", "arguments": '{"x": 1}'}]
    """
    if style is CallStyle.TAGGED:
        return [_call_of(found.strip()) for found in _TAGGED.findall(text)]
    if style is CallStyle.HARMONY:
        return [call_or_garbage(one.recipient, one.body, one.body) for one in _harmony(text) if one.recipient]
    stripped = text.strip()
    return [_call_of(stripped)] if stripped.startswith("{") and '"name"' in stripped else []


def call_or_garbage(name: str, arguments: str, text: str) -> FunctionCall:
    """A call; one without a name that holds `text` if the arguments are not a JSON object."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    return FunctionCall(name=name, arguments=arguments) if is_object else FunctionCall(name="", arguments=text)


def without_calls(text: str, style: CallStyle | None) -> str:
    """The text of a reply that holds calls, without them. None is a syntax that vLLM reads."""
    if style is CallStyle.TAGGED:
        return _TAGGED.sub("", text).strip()
    if style is CallStyle.BARE and find_calls(text, style):
        return ""
    if is_harmony(text):
        return harmony_fields(text)["content"]
    read_by_vllm = [syntax.opening for syntax in SYNTAXES if syntax.style is None]
    openings = (found.start() for opening in read_by_vllm if (found := opening.search(text)))
    return text[: min(openings, default=len(text))].strip()


def harmony_fields(text: str) -> dict[str, str]:
    """The `content` and the `thinking` of a reply of gpt-oss, as its chat template takes them.

    Source: https://cookbook.openai.com/articles/openai-harmony

    Example: harmony_fields("<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>4")
             == {"content": "4", "thinking": "2"}
    """
    said = [one for one in _harmony(text) if not one.recipient]
    return {
        "content": "\n".join(one.body for one in said if one.channel != "analysis"),
        "thinking": "\n".join(one.body for one in said if one.channel == "analysis"),
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class _Harmony:
    """One message of a reply of gpt-oss, which may hold several."""

    channel: str
    recipient: str
    body: str


def is_harmony(text: str) -> bool:
    """Whether a reply is in the format of gpt-oss."""
    return "<|message|>" in text and ("<|channel|>" in text or "to=" in text)


def _harmony(text: str) -> Iterator[_Harmony]:
    for part in text.split("<|start|>assistant"):
        header, begun, body = part.partition("<|message|>")
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header) if begun or channel else None
        if not begun and recipient is None:
            body = part
        yield _Harmony(
            channel=channel[1] if channel else "",
            recipient=recipient[1] if recipient else "",
            body=_END_OF_MESSAGE.split(body, maxsplit=1)[0],
        )


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


def with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the ids of calls as `Syntax.has_named_ids` says, also in the answers of tools."""
    named: dict[str, str] = {}
    shown: list[Message] = []
    for message in messages:
        message = message.copy()
        if "tool_calls" in message:
            for call in message["tool_calls"]:
                named[call["id"]] = f"functions.{call['function']['name']}:{len(named)}"
            calls = [ToolCall(**{**call, "id": named[call["id"]]}) for call in message["tool_calls"]]
            message["tool_calls"] = calls
        elif "tool_call_id" in message:
            message["tool_call_id"] = named.get(message["tool_call_id"], message["tool_call_id"])
        shown.append(message)
    return shown


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
