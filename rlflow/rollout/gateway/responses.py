"""OpenAI's Responses API on the wire. Pure.

A reply is one message and its calls, as items. Reasoning items are passed over, because a reply keeps its thoughts in
its text.
"""

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
from rlflow.types import Message

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
_UNSERVED: Unserved = {
    "background": ((False,), "a reply is awaited; send the request without it"),
    "conversation": ((), "send the items, or `previous_response_id`"),
    "context_management": (([],), "a conversation is never shortened"),
    "prompt": ((), "send `instructions` and `input`"),
    "truncation": (("disabled",), "a conversation that is too long is refused"),
    "moderation": ((), "nothing is moderated"),
}


def _read(fields: JsonObject, remembered: Remembered) -> ChatRequest:
    refuse_unserved(fields, _UNSERVED)
    said = [*_earlier(fields, remembered), *_read_input(fields)]
    instructions = fields.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise Refused(f"`instructions` must be text; got {excerpt(instructions)}", param="instructions")
    tools, told = _read_tools(fields)
    return ChatRequest(
        fields=fields,
        messages=[*([Message(role="system", content=instructions)] if instructions else []), *said],
        tools=tools,
        instruction="\n".join(filter(None, (told, _read_format(fields.get("text"), tools)))),
        max_new_tokens=read_count(fields, "max_output_tokens"),
        with_logprobs=_LOGPROBS in read_texts(fields, "include"),
        kept=said,
    )


def _earlier(fields: JsonObject, remembered: Remembered) -> list[Message]:
    previous = fields.get("previous_response_id")
    if previous is None:
        return []
    if not isinstance(previous, str) or previous not in remembered:
        raise Refused(
            f"`previous_response_id` = {excerpt(previous)}: no response of this episode has this id",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return remembered[previous]


def _read_input(fields: JsonObject) -> list[Message]:
    if isinstance(fields.get("input"), str):
        return [Message(role="user", content=fields["input"])]
    messages: list[Message] = []
    for index, item in enumerate(read_list(fields, "input")):
        where, kind = f"input[{index}]", item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(read_message(item, where, *_TEXTS))
        elif kind == "function_call":
            # The calls of a reply follow its text as items of their own.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(Message(role="assistant", content=""))
            messages[-1].setdefault("tool_calls", []).append(read_call(item.get("call_id"), item, where))
        elif kind == "function_call_output":
            text = read_text(item.get("output"), f"{where}.output", *_TEXTS)
            messages.append(Message(role="tool", content=text, tool_call_id=str(item.get("call_id") or "")))
        elif kind != "reasoning":
            raise Refused(
                f"{where} has the type {excerpt(kind)}; message, function_call, function_call_output and reasoning are "
                "served",
                param="input",
            )
    return messages


def _read_tools(fields: JsonObject) -> tuple[list[ToolSchema], str]:
    tools, choice = read_tools(fields), fields.get("tool_choice")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise Refused(f"`tools` must be functions, which the program runs; got {excerpt(tool)}", param="tools")
    forced = str(choice.get("name")) if isinstance(choice, dict) and choice.get("type") == "function" else None
    return read_choice(choice, [schema_of(tool) for tool in tools], forced)


def _read_format(text: Any, tools: list[ToolSchema]) -> str:
    form = (text.get("format") if isinstance(text, dict) else None) or {}
    if not isinstance(form, dict):
        raise Refused(f"`text.format` must be an object; got {excerpt(form)}", param="text")
    return format_instruction(form.get("type"), form.get("schema"), tools)


def _answer(answered: Answered) -> JsonObject:
    fields, (shown,) = answered.request.fields, answered.shown
    is_cut = shown.finish_reason == "length"
    prompt, sampled = answered.num_prompt_tokens, answered.num_sampled_tokens
    return {
        "id": f"resp_{answered.number}",
        "object": "response",
        "created_at": answered.created_s,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": answered.model,
        "output": _items(answered, "incomplete" if is_cut else "completed"),
        "instructions": fields.get("instructions"),
        "previous_response_id": fields.get("previous_response_id"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "text": fields.get("text") or {"format": {"type": "text"}},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _items(answered: Answered, status: str) -> list[JsonObject]:
    (shown,) = answered.shown
    calls, text, items = shown.message.get("tool_calls", []), shown.message["content"], list[JsonObject]()
    if text or not calls:
        logprobs = [{**each, "bytes": []} for each in shown.logprobs] if answered.request.with_logprobs else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        message = {"id": f"msg_{answered.number}", "type": "message", "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for index, call in enumerate(calls):
        item = {"id": f"fc_{answered.number}_{index}", "type": "function_call", "status": status}
        items.append({**item, "call_id": call["id"], **call["function"]})
    return items


def _stream(answer: JsonObject, request: ChatRequest) -> str:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[JsonObject] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        events += _item_events(item, index)
    events.append({"type": f"response.{answer['status']}", "response": answer})
    numbered = [{**each, "sequence_number": number} for number, each in enumerate(events)]
    return "".join(event(each, each["type"]) for each in numbered)


def _item_events(item: JsonObject, index: int) -> list[JsonObject]:
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty, arguments = {"arguments": ""}, item["arguments"]
        pieces: list[JsonObject] = [
            {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
            {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments},
        ]
    else:
        (part,), empty = item["content"], {"content": []}
        place["content_index"] = 0
        said, none = {"logprobs": part["logprobs"]}, {**part, "text": "", "logprobs": []}
        pieces = [
            {"type": "response.content_part.added", **place, "part": none},
            {"type": "response.output_text.delta", **place, "delta": part["text"], **said},
            {"type": "response.output_text.done", **place, "text": part["text"], **said},
            {"type": "response.content_part.done", **place, "part": part},
        ]
    begun = {**item, "status": "in_progress", **empty}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *pieces,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


RESPONSES = Api(read=_read, answer=_answer, stream=_stream)
