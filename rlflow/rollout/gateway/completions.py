"""OpenAI's chat completions on the wire. Pure."""

from typing import Any

from rlflow.envs.base import ToolSchema
from rlflow.rollout.gateway.wire import (
    Answered,
    Api,
    ChatRequest,
    JsonObject,
    Refused,
    Remembered,
    Shown,
    Unserved,
    event,
    excerpt,
    format_instruction,
    read_call,
    read_choice,
    read_count,
    read_list,
    read_message,
    read_texts,
    read_tools,
    refuse_unserved,
)
from rlflow.types import Message

MAX_REPLIES = 128
"""To one request."""

_UNSERVED: Unserved = {
    "functions": (([],), "send `tools`"),
    "function_call": (("auto", "none"), "send `tool_choice`"),
    "modalities": ((["text"],), "there is only text"),
    "audio": ((), "there is only text"),
    "web_search_options": ((), "nothing is searched"),
}


def _read(fields: JsonObject, remembered: Remembered) -> ChatRequest:
    refuse_unserved(fields, _UNSERVED)
    messages = [_read_message(each, f"messages[{index}]") for index, each in enumerate(read_list(fields, "messages"))]
    tools, told = _read_tools(fields)
    num_replies = read_count(fields, "n") or 1
    if num_replies > MAX_REPLIES:
        raise Refused(f"`n` = {num_replies} is not served: one request has {MAX_REPLIES} replies at most", param="n")
    return ChatRequest(
        fields=fields,
        messages=messages,
        tools=tools,
        instruction="\n".join(filter(None, (told, _read_format(fields.get("response_format"), tools)))),
        max_new_tokens=read_count(fields, "max_completion_tokens", "max_tokens"),
        stop=read_texts(fields, "stop"),
        num_replies=num_replies,
        template_args=_read_template_args(fields.get("chat_template_kwargs") or {}),
        with_logprobs=bool(fields.get("logprobs")),
    )


def _read_tools(fields: JsonObject) -> tuple[list[ToolSchema], str]:
    tools, choice = read_tools(fields), fields.get("tool_choice")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(
                f'`tools` must be a list of {{"type": "function", "function": {{"name": ...}}}}; got {excerpt(tool)}',
                param="tools",
            )
    named = choice.get("function") if isinstance(choice, dict) else None
    return read_choice(choice, tools, named.get("name") if isinstance(named, dict) else None)


def _read_template_args(args: Any) -> JsonObject:
    if not isinstance(args, dict):
        raise Refused(f"`chat_template_kwargs` must be an object; got {excerpt(args)}", param="chat_template_kwargs")
    return args


def _read_format(form: Any, tools: list[ToolSchema]) -> str:
    if form is not None and not isinstance(form, dict):
        raise Refused(f"`response_format` must be an object; got {excerpt(form)}", param="response_format")
    form = form or {}
    described = form.get("json_schema")
    return format_instruction(form.get("type"), described.get("schema") if isinstance(described, dict) else None, tools)


def _read_message(message: Any, where: str) -> Message:
    read = read_message(message, where, "text")
    if read["role"] == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refused(f"{where}.tool_calls must be a list of objects; got {excerpt(calls)}")
        read["tool_calls"] = [
            read_call(call.get("id"), call.get("function"), f"{where}.tool_calls[{index}]")
            for index, call in enumerate(calls)
        ]
    if read["role"] == "tool" and message.get("tool_call_id") is not None:
        read["tool_call_id"] = str(message["tool_call_id"])
    if read["role"] != "assistant" and isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return read


def _answer(answered: Answered) -> JsonObject:
    prompt, sampled = answered.num_prompt_tokens, answered.num_sampled_tokens
    return {
        "id": f"chatcmpl-{answered.number}",
        "object": "chat.completion",
        "created": answered.created_s,
        "model": answered.model,
        "choices": [_choice(shown, index, answered.request) for index, shown in enumerate(answered.shown)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _choice(shown: Shown, index: int, request: ChatRequest) -> JsonObject:
    calls, content = shown.message.get("tool_calls", []), shown.message["content"]
    message: JsonObject = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    logprobs = {"content": shown.logprobs, "refusal": None} if request.with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": shown.finish_reason}


def _stream(answer: JsonObject, request: ChatRequest) -> str:
    options = request.fields.get("stream_options")
    with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    head = {**answer, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    chunks = [
        {**head, "choices": [choice], **({"usage": None} if with_usage else {})}
        for whole in answer["choices"]
        for choice in _deltas(whole)
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return "".join(map(event, chunks)) + "data: [DONE]\n\n"


def _deltas(choice: JsonObject) -> list[JsonObject]:
    delta = {name: value for name, value in choice["message"].items() if name != "refusal"}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    return [
        {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None},
        {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]},
    ]


COMPLETIONS = Api(read=_read, answer=_answer, stream=_stream)
