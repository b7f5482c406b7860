"""OpenAI's chat completions on the wire <-> our messages. Pure.

    body of a request -> ChatRequest          reply -> completion object, or the chunks of a stream

A setting that cannot be served faithfully is refused with the reason. Sampling settings are ignored: the run's apply.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlflow.envs.base import POLICY, ToolSchema
from rlflow.rollout.tool_calls import CallStyle, without_calls
from rlflow.types import ROLES, FunctionCall, Message, ToolCall, Turn

JsonObject: TypeAlias = dict[str, Any]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Accepted without effect, because what is trained on must be sampled with the run's settings."""

UNTRAINED = "untrained/"
"""A model of this prefix and an agent's name is the policy in that role; it is not trained on these replies."""

_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "one reply is sampled for each request; send several requests"),
    "stop": (([], ""), "replies end where the model ends them; cut the text in the program"),
    "response_format": (({"type": "text"},), "replies are not constrained; ask for the format in the prompt"),
    "logit_bias": (({},), "replies are sampled as the run says"),
    "functions": (([],), "send `tools`"),
    "function_call": (("auto", "none"), "send `tool_choice`"),
    "modalities": ((["text"],), "there is only text"),
    "audio": ((), "there is only text"),
    "top_logprobs": ((0,), "only the sampled tokens' log-probabilities are known"),
    "chat_template_kwargs": (({},), "set rollout.template_args for the whole run"),
}
"""Setting -> the values that change nothing, and the answer to any other value."""


class Refused(Exception):
    """A request that is not served; becomes the answer that OpenAI's own server would give."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> JsonObject:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param or None, "code": self.code}}


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatRequest:
    """A program's request."""

    messages: list[Message]
    """As the program sent them; earlier replies are as it was shown them, without the markup of tool calls."""
    tools: list[ToolSchema]
    agent: str
    is_trainable: bool
    max_new_tokens: int | None
    is_stream: bool
    with_usage: bool
    """True if a stream ends with the numbers of tokens."""
    with_logprobs: bool
    ignored: tuple[str, ...]
    """The settings that were sent and have no effect."""


def read_request(body: bytes) -> ChatRequest:
    """The request in a body. Raises Refused."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f"the body must be a JSON object; got {_shown(fields)}")
    for name, (harmless, reason) in _REFUSED.items():
        if fields.get(name) is not None and fields[name] not in harmless:
            raise Refused(f"`{name}` = {_shown(fields[name])} is not served: {reason}", param=name)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"`messages` must be a list of at least one; got {_shown(messages)}", param="messages")
    options = fields.get("stream_options") or {}
    model = str(fields.get("model") or "")
    untrained = model.removeprefix(UNTRAINED) if model.startswith(UNTRAINED) else ""
    ignored = [name for name in SAMPLING if fields.get(name) is not None]
    return ChatRequest(
        messages=[_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=_read_tools(fields),
        agent=untrained or POLICY,
        is_trainable=not untrained,
        max_new_tokens=_read_limit(fields),
        is_stream=bool(fields.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        with_logprobs=bool(fields.get("logprobs")),
        ignored=(*ignored, *(["parallel_tool_calls"] if fields.get("parallel_tool_calls") is False else [])),
    )


def _read_tools(fields: JsonObject) -> list[ToolSchema]:
    """The tools that the model is told of; empty if the program wants no call."""
    choice, tools = fields.get("tool_choice"), fields.get("tools") or []
    if choice not in (None, "auto", "none"):
        raise Refused(
            f"`tool_choice` = {_shown(choice)} is not served: a call cannot be forced; send auto or none",
            param="tool_choice",
        )
    is_list = isinstance(tools, list)
    if not is_list or not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise Refused('`tools` must be a list of {"type": "function", "function": {...}}', param="tools")
    return [] if choice == "none" else tools


def _read_limit(fields: JsonObject) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = fields.get(name)
        if limit is not None:
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise Refused(f"`{name}` must be a positive number of tokens; got {_shown(limit)}", param=name)
            return limit
    return None


def _read_message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise Refused(f"{where} must be an object whose `role` is one of {', '.join(ROLES)}; got {_shown(message)}")
    read = Message(role="system" if role == "developer" else role, content=_read_content(message, where))
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "tool" and message.get("tool_call_id") is not None:
        read["tool_call_id"] = str(message["tool_call_id"])
    if role != "assistant" and isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return read


def _read_content(message: JsonObject, where: str) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text, or a list of parts; got {_shown(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(f"{where}.content has a part of the type {kind!r}; only text is served")
        texts.append(part["text"])
    return "\n".join(texts)


def _read_calls(calls: Any, where: str) -> list[ToolCall]:
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f'{where} must be a list of {{"id": ..., "function": {{"name": ...}}}}; got {_shown(call)}')
        arguments = function.get("arguments") or ""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        named = FunctionCall(name=function["name"], arguments=text)
        read.append(ToolCall(id=str(call.get("id") or ""), type="function", function=named))
    return read


def shown_message(message: Message, turn: Turn) -> Message:
    """The reply as a program sees it: the calls, and the text without them.

    If a call was cut off or has no name, the program sees the text as it was sampled.
    """
    calls = message.get("tool_calls", [])
    content = message["content"]
    if not calls or turn.finish_reason == "length" or not all(call["function"]["name"] for call in calls):
        return Message(role="assistant", content=content)
    style = CallStyle.TAGGED if "<tool_call>" in content else CallStyle.BARE
    return Message(role="assistant", content=without_calls(content, style), tool_calls=calls)


def answer_of(shown: Message, turn: Turn, request: ChatRequest, *, head: JsonObject) -> list[JsonObject]:
    """The answer to a request: one completion, or the chunks of a stream; `head` holds the id, time and model.

    The reply is one chunk, sent when all of it is sampled. Log-probabilities name their tokens by ids, as with vLLM's
    `return_tokens_as_token_ids`.
    """
    calls = shown.get("tool_calls", [])
    message: JsonObject = {"role": "assistant", "content": None if calls and not shown["content"] else shown["content"]}
    finish_reason = "tool_calls" if calls else turn.finish_reason
    logprobs = None
    if request.with_logprobs:
        tokens = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.output_ids, turn.logprobs, strict=True)
        ]
        logprobs = {"content": tokens, "refusal": None}
    prompt, sampled = len(turn.prompt_ids), len(turn.output_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    if not request.is_stream:
        message["refusal"] = None
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        return [{**head, "object": "chat.completion", "choices": [choice], "usage": usage}]
    if calls:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    choices = [
        {"index": 0, "delta": message, "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason},
    ]
    head = {**head, "object": "chat.completion.chunk"}
    if not request.with_usage:
        return [{**head, "choices": [choice]} for choice in choices]
    return [
        *({**head, "choices": [choice], "usage": None} for choice in choices),
        {**head, "choices": [], "usage": usage},
    ]


class SentReplies:
    """Recognises the replies that a program sends back, so that a conversation goes on with their tokens.

    Programs rewrite replies without meaning to: null or "" for no text, text in parts, calls without ids, arguments
    with other spacing. If the text or the calls differ otherwise, or stand elsewhere in the conversation, the message
    is the program's own.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[object, ...], list[tuple[Message, Message]]] = {}
        """Replies as the program saw them, and as the chat returned them, with everything that was sampled."""

    def add(self, shown: Message, message: Message, position: int) -> None:
        """Note that the program is sent `shown` for `message`, the reply to `position` messages."""
        self._sent.setdefault(_key_of(shown, position), []).append((shown, message))

    def resolve(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation, with each reply that was sent as the chat returned it."""
        resolved = list(messages)
        for position, message in enumerate(messages):
            sent = self._sent.get(_key_of(message, position), []) if message["role"] == "assistant" else []
            # Several replies may look alike, if they were asked for at once: take the last one with these calls or this
            # very text.
            likeness = [
                (_ids_of(shown) == _ids_of(message), shown["content"] == message["content"]) for shown, _ in sent
            ]
            if sent:
                resolved[position] = sent[max(range(len(sent)), key=lambda index: (likeness[index], index))][1]
        return resolved


def _key_of(message: Message, position: int) -> tuple[object, ...]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return position, message["content"].strip(), *((each["name"], _canonical(each["arguments"])) for each in functions)


def _ids_of(message: Message) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls", []))


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}..."
