"""Anthropic's Messages API on the wire. Pure.

Blocks of thinking are passed over, because a reply keeps its thoughts in its text. A call whose arguments are no JSON
object cannot be said in this API: then the program sees the reply as text, as it was sampled. The answer of a tool that
failed (`is_error`) begins with "Error: ", because a message has no other place to say so.
"""

import json
from typing import Any

from rlflow.envs.base import ToolSchema
from rlflow.rollout.gateway.wire import (
    Answered,
    Api,
    ChatRequest,
    JsonObject,
    Refused,
    Remembered,
    Unserved,
    event,
    excerpt,
    format_instruction,
    read_call,
    read_choice,
    read_count,
    read_list,
    read_message,
    read_text,
    read_texts,
    read_tools,
    refuse_unserved,
    schema_of,
)
from rlflow.types import Message, ToolCall

_UNSERVED: Unserved = {
    "container": ((), "the program runs its own tools"),
    "mcp_servers": (([],), "the program runs its own tools"),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "auto"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _read(fields: JsonObject, remembered: Remembered) -> ChatRequest:
    refuse_unserved(fields, _UNSERVED)
    _refuse_edits(fields.get("context_management"))
    system = read_text(fields.get("system") or "", "system", "text")
    messages = [Message(role="system", content=system)] if system else []
    for index, message in enumerate(read_list(fields, "messages")):
        messages += _read_message(message, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        raise Refused("a reply begins anew: end `messages` with one of the user, not of the assistant")
    tools, told = _read_tools(fields)
    return ChatRequest(
        fields=fields,
        messages=messages,
        tools=tools,
        instruction="\n".join(filter(None, (told, _read_format(fields, tools)))),
        max_new_tokens=read_count(fields, "max_tokens"),
        stop=read_texts(fields, "stop_sequences"),
        has_object_arguments=True,
    )


def _refuse_edits(management: Any) -> None:
    """What clears old thinking changes nothing, because no thinking comes back."""
    edits = (management.get("edits") if isinstance(management, dict) else management) or []
    for edit in edits if isinstance(edits, list) else [edits]:
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith("clear_thinking"):
            raise Refused(
                f"`context_management` has the edit {excerpt(edit)}: a conversation is never shortened",
                param="context_management",
            )


def _read_message(message: Any, where: str) -> list[Message]:
    """The answers of tools, which are messages of their own, and then the text with the calls."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [read_message(message, where, "text")]
    answers, calls, rest = list[Message](), list[ToolCall](), list[Any]()
    for index, block in enumerate(content):
        place, kind = f"{where}.content[{index}]", block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            answers.append(_read_answer(block, place))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append(read_call(block.get("id"), function, place))
        elif kind not in ("thinking", "redacted_thinking"):
            rest.append(block)
    said = read_message({**message, "content": rest}, where, "text")
    if calls:
        said["tool_calls"] = calls
    return answers if answers and not rest else [*answers, said]


def _read_answer(block: JsonObject, where: str) -> Message:
    text = read_text(block.get("content") or "", f"{where}.content", "text")
    shown = f"Error: {text}" if block.get("is_error") else text
    return Message(role="tool", content=shown, tool_call_id=str(block.get("tool_use_id") or ""))


def _read_tools(fields: JsonObject) -> tuple[list[ToolSchema], str]:
    tools, choice = read_tools(fields), fields.get("tool_choice") or {"type": "auto"}
    for tool in tools:
        is_own = isinstance(tool, dict) and tool.get("type") in (None, "custom")
        if not is_own or not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise Refused(
                f"`tools` must have a `name` and an `input_schema`, and be run by the program; got {excerpt(tool)}",
                param="tools",
            )
    if not isinstance(choice, dict) or str(choice.get("type")) not in _CHOICES:
        raise Refused(f"`tool_choice` must be an object of the type auto, any, tool or none; got {excerpt(choice)}")
    schemas = [schema_of({**tool, "parameters": tool["input_schema"]}) for tool in tools]
    forced = str(choice.get("name")) if choice["type"] == "tool" else None
    return read_choice(_CHOICES[choice["type"]], schemas, forced)


def _read_format(fields: JsonObject, tools: list[ToolSchema]) -> str:
    config = fields.get("output_config") or {}
    form = fields.get("output_format") or (config.get("format") if isinstance(config, dict) else config) or {}
    if not isinstance(form, dict):
        raise Refused(f"`output_config` must be an object; got {excerpt(config)}", param="output_config")
    return format_instruction(form.get("type"), form.get("schema"), tools)


def _answer(answered: Answered) -> JsonObject:
    (shown,) = answered.shown
    calls, text = shown.message.get("tool_calls", []), shown.message["content"]
    content: list[JsonObject] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append({**block, "input": json.loads(function["arguments"])})
    is_stopped = bool(shown.stop) and not calls
    return {
        "id": f"msg_{answered.number}",
        "type": "message",
        "role": "assistant",
        "model": answered.model,
        "content": content,
        "stop_reason": "stop_sequence" if is_stopped else _STOP_REASONS[shown.finish_reason],
        "stop_sequence": shown.stop if is_stopped else None,
        "usage": {
            "input_tokens": answered.num_prompt_tokens,
            "output_tokens": answered.num_sampled_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _stream(answer: JsonObject, request: ChatRequest) -> str:
    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**answer["usage"], "output_tokens": 0}
    events: list[JsonObject] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": {**block, **empty}},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events += [
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": answer["usage"]["output_tokens"]}},
        {"type": "message_stop"},
    ]
    return "".join(event(each, each["type"]) for each in events)


MESSAGES = Api(read=_read, answer=_answer, stream=_stream)
