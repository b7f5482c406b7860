"""What the APIs of the gateway have in common. Pure.

    fields of a request -> Api.read -> ChatRequest        replies -> Api.answer -> body -> Api.stream -> events

Each API is one file: `completions`, `responses`, `anthropic`. A setting that cannot be served faithfully is refused
with the reason. Sampling settings are ignored: the run's apply.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlflow.envs.base import POLICY, ToolSchema
from rlflow.rollout.stopping import first_stop
from rlflow.rollout.tool_calls import find_calls, harmony_fields, is_harmony, without_calls
from rlflow.rollout.tool_syntax import CallStyle
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
    "reasoning_effort",
    "reasoning",
    "thinking",
    "verbosity",
)
"""Accepted without effect, because what is trained on must be sampled with the run's settings."""

UNTRAINED = "untrained/"
"""A model of this prefix and an agent's name is the policy in that role; it is not trained on these replies."""

NOT_CONSTRAINED = "replies are not constrained; ask for the form in the prompt"

Unserved: TypeAlias = Mapping[str, tuple[tuple[object, ...], str]]
"""Setting -> the values that change nothing, and the answer to any other value."""

NOT_SERVED: Unserved = {
    "logit_bias": (({},), "replies are sampled as the run says"),
    "bad_words": (([],), "replies are sampled as the run says"),
    "min_tokens": ((0,), "replies end where the model ends them"),
    "ignore_eos": ((False,), "replies end where the model ends them"),
    "stop_token_ids": (([],), "send `stop`"),
    "structured_outputs": ((), NOT_CONSTRAINED),
    "guided_json": ((), NOT_CONSTRAINED),
    "guided_regex": ((), NOT_CONSTRAINED),
    "guided_choice": ((), NOT_CONSTRAINED),
    "guided_grammar": ((), NOT_CONSTRAINED),
    "continue_final_message": ((False,), "a reply begins anew; end the conversation with a message of the user"),
    "top_logprobs": ((0,), "only the sampled tokens' log-probabilities are known"),
}
"""What no API serves."""


class Refused(Exception):
    """A request that is not served."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> JsonObject:
        """The answer, which the clients of OpenAI and of Anthropic both understand."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param or None, "code": self.code}
        return {"type": "error", "error": error}


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatRequest:
    """A program's request."""

    fields: JsonObject
    """All of its body."""
    messages: list[Message]
    """As the program sent them; earlier replies are as it was shown them, without the markup of tool calls."""
    tools: list[ToolSchema]
    instruction: str = ""
    """What the policy is told of the form of its reply, at the end of the last message; it may do otherwise."""
    max_new_tokens: int | None
    stop: tuple[str, ...] = ()
    """The reply ends with the first of them."""
    num_replies: int = 1
    template_args: JsonObject = field(default_factory=dict)
    """What the chat template should be told; served only if the run tells it that anyway."""
    with_logprobs: bool = False
    has_object_arguments: bool = False
    """Whether the API can say only calls whose arguments are a JSON object."""
    kept: list[Message] | None = None
    """The conversation that a later request names by the id of the answer; None if the API has no such names."""

    @property
    def is_stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def is_trainable(self) -> bool:
        return not self._model.startswith(UNTRAINED)

    @property
    def agent(self) -> str:
        return POLICY if self.is_trainable else self._model.removeprefix(UNTRAINED) or POLICY

    @property
    def ignored(self) -> list[str]:
        """The settings that were sent and have no effect."""
        ignored = [name for name in SAMPLING if self.fields.get(name) is not None]
        choice = self.fields.get("tool_choice")
        if self.fields.get("parallel_tool_calls") is False:
            ignored.append("parallel_tool_calls")
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
            ignored.append("disable_parallel_tool_use")
        return ignored

    @property
    def _model(self) -> str:
        return str(self.fields.get("model") or "")


@dataclass(kw_only=True, slots=True, frozen=True)
class Shown:
    """A reply as a program sees it."""

    message: Message
    turn: Turn
    stop: str = ""
    """The stop string that ended it; the message ends before it."""

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if "tool_calls" in self.message else self.turn.finish_reason

    @property
    def logprobs(self) -> list[JsonObject]:
        """Of each sampled token. Tokens are named by their ids, as with vLLM's `return_tokens_as_token_ids`."""
        return [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(self.turn.output_ids, self.turn.logprobs, strict=True)
        ]


@dataclass(kw_only=True, slots=True, frozen=True)
class Answered:
    """A request with its replies, one or more."""

    request: ChatRequest
    shown: Sequence[Shown]
    number: int
    """No other answer of the gateway has it."""
    created_s: int
    """Seconds since 1970."""
    model: str

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.shown[0].turn.prompt_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(shown.turn.output_ids) for shown in self.shown)


Remembered: TypeAlias = Mapping[str, list[Message]]
"""The id of an answer -> its conversation, with the reply as the program saw it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Api:
    """One way of speaking to the policy."""

    read: Callable[[JsonObject, Remembered], ChatRequest]
    """Raises Refused."""
    answer: Callable[[Answered], JsonObject]
    stream: Callable[[JsonObject, ChatRequest], str]
    """An answer as server-sent events. Each text and each call is one piece, sent when all of it is sampled."""


def event(body: JsonObject, name: str = "") -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body)}\n\n"


def refuse_unserved(fields: JsonObject, unserved: Unserved) -> None:
    for name, (harmless, reason) in {**NOT_SERVED, **unserved}.items():
        if fields.get(name) is not None and fields[name] not in harmless:
            raise Refused(f"`{name}` = {excerpt(fields[name])} is not served: {reason}", param=name)


def read_list(fields: JsonObject, name: str) -> list[Any]:
    """A setting that is a list of at least one."""
    found = fields.get(name)
    if not isinstance(found, list) or not found:
        raise Refused(f"`{name}` must be a list of at least one; got {excerpt(found)}", param=name)
    return found


def read_count(fields: JsonObject, *names: str) -> int | None:
    """The first of these settings that is there: a positive number."""
    for name in names:
        count = fields.get(name)
        if count is not None:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise Refused(f"`{name}` must be a positive number; got {excerpt(count)}", param=name)
            return count
    return None


def read_texts(fields: JsonObject, name: str) -> tuple[str, ...]:
    """A setting that is a text, or a list of texts; without empty ones."""
    found = fields.get(name) or []
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(f"`{name}` must be a text or a list of texts; got {excerpt(found)}", param=name)
    return tuple(filter(None, texts))


def read_message(message: Any, where: str, *kinds: str) -> Message:
    """A message whose content is text, or a list of parts of these kinds."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise Refused(f"{where} must be an object whose `role` is one of {', '.join(ROLES)}; got {excerpt(message)}")
    content = message.get("content")
    is_empty = content is None and role == "assistant"
    text = "" if is_empty else read_text(content, f"{where}.content", *kinds)
    return Message(role="system" if role == "developer" else role, content=text)


def read_text(content: Any, where: str, *kinds: str) -> str:
    """Text, or a list of parts of these kinds, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where} must be text, or a list of parts; got {excerpt(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(f"{where} has a part of the type {kind!r}; only text is served")
        texts.append(part["text"])
    return "\n".join(texts)


def read_call(call_id: object, function: Any, where: str) -> ToolCall:
    """An earlier call of a tool; `function` holds its name and arguments."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} must have the `name` of a tool; got {excerpt(function)}")
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(
        id=str(call_id or ""), type="function", function=FunctionCall(name=function["name"], arguments=text)
    )


def schema_of(function: JsonObject) -> ToolSchema:
    """A tool as the chat template is told of it."""
    shown = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": shown}


def read_choice(choice: Any, tools: list[ToolSchema], forced: str | None) -> tuple[list[ToolSchema], str]:
    """The tools that the policy is told of, and what it is told of calling them.

    `choice` is auto, none or required; `forced` is the one tool that it must call, or None.
    """
    names = [function["name"] for tool in tools if isinstance(function := tool["function"], dict)]
    if forced is not None:
        if forced not in names:
            raise Refused(f"`tool_choice` names the tool {excerpt(forced)}; there are {excerpt(names)}", param="tools")
        return tools, f"Your next reply must call the tool {forced}."
    if choice not in (None, "auto", "none", "required"):
        raise Refused(
            f"`tool_choice` = {excerpt(choice)} is not served; send auto, none, required or the name of one tool",
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise Refused("`tool_choice` requires a call, and `tools` has none", param="tools")
    return ([] if choice == "none" else tools), ("Your next reply must call a tool." if choice == "required" else "")


def format_instruction(form: Any, schema: Any, tools: list[ToolSchema]) -> str:
    """What the policy is told of a format: json_object, or json_schema with a schema."""
    if form in (None, "text"):
        return ""
    if form not in ("json_object", "json_schema") or (form == "json_schema" and not isinstance(schema, dict)):
        raise Refused(f"a reply's format must be text, json_object or json_schema with a schema; got {excerpt(form)}")
    what = f"JSON of this schema: {json.dumps(schema)}" if form == "json_schema" else "one JSON object"
    return f"Your next reply{', unless it calls a tool,' if tools else ''} must be nothing but {what}"


def read_tools(fields: JsonObject) -> list[Any]:
    """The tools of a request, whatever they are. Raises Refused for anything but a list."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise Refused(f"`tools` must be a list; got {excerpt(tools)}", param="tools")
    return tools


def instructed(messages: Sequence[Message], instruction: str) -> list[Message]:
    """The conversation with an instruction at its end; as it is without one."""
    *before, last = messages
    if not instruction:
        return [*before, last]
    if last["role"] == "assistant":
        raise Refused("`tool_choice` and formats are for conversations that do not end with a reply")
    return [*before, Message(**{**last, "content": f"{last['content']}\n\n{instruction}"})]


def shown_reply(message: Message, turn: Turn, request: ChatRequest) -> Shown:
    """The reply to a request as the program sees it."""
    shown = shown_message(message, turn)
    if request.has_object_arguments and not all(map(_has_object, shown.get("tool_calls", []))):
        shown = Message(role="assistant", content=message["content"])
    ending = first_stop(message["content"], request.stop)
    if ending is None:
        return Shown(message=shown, turn=turn)
    # A stop string in the markup of a call goes with the markup.
    content = shown["content"].partition(ending.text)[0]
    return Shown(message=Message(**{**shown, "content": content}), turn=turn, stop=ending.text)


def shown_message(message: Message, turn: Turn) -> Message:
    """The reply as a program sees it: the calls, and the text without them and without gpt-oss's channels.

    If a call was cut off or has no name, the program sees the text as it was sampled.
    """
    calls = message.get("tool_calls", [])
    content = message["content"]
    if turn.finish_reason == "length" or not all(call["function"]["name"] for call in calls):
        return Message(role="assistant", content=content)
    if not calls:
        return Message(role="assistant", content=harmony_fields(content)["content"] if is_harmony(content) else content)
    bare = CallStyle.BARE if find_calls(content, CallStyle.BARE) else None
    style = CallStyle.TAGGED if "<tool_call>" in content else bare
    return Message(role="assistant", content=without_calls(content, style), tool_calls=calls)


def _has_object(call: ToolCall) -> bool:
    """Whether the arguments can be sent as a JSON object: Python reads NaN and 1e999 too, which JSON cannot say."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict)


def excerpt(value: object) -> str:
    """A value in a message to the user, at most 200 characters of it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}..."
