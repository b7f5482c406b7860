"""Recognises the replies that a program sends back. Pure, but for what it remembers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.rollout.gateway.wire import ChatRequest, instructed
from rlflow.types import Message


@dataclass(kw_only=True, slots=True, frozen=True)
class _Sent:
    shown: Message
    """The reply as the program saw it."""
    message: Message
    """As the chat returned it, with everything that was sampled."""
    question: Message
    """The message before it as the program sent it."""
    instruction: str
    """What the policy was told at the end of that message."""


class SentReplies:
    """Recognises the replies that a program sends back, so that a conversation goes on with their tokens.

    Programs rewrite replies without meaning to: null or "" for no text, text in parts, calls without ids, arguments
    with other spacing. If the text or the calls differ otherwise, or stand elsewhere in the conversation, the message
    is the program's own.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[object, ...], list[_Sent]] = {}

    def add(self, shown: Message, message: Message, request: ChatRequest) -> None:
        """Note that the program is sent `shown` for `message`, the reply to `request`."""
        sent = _Sent(shown=shown, message=message, question=request.messages[-1], instruction=request.instruction)
        self._sent.setdefault(_key_of(shown, len(request.messages)), []).append(sent)

    def resolve(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation, with each reply that was sent, and the message before it, as the chat knows them."""
        resolved = list(messages)
        for position, message in enumerate(messages):
            found = self._sent.get(_key_of(message, position), []) if message["role"] == "assistant" else []
            if found:
                question = messages[position - 1]
                sent = _likest(found, message, question)
                resolved[position] = sent.message
                if sent.question == question:
                    resolved[:position] = instructed(resolved[:position], sent.instruction)
        return resolved


def _likest(found: Sequence[_Sent], message: Message, question: Message) -> _Sent:
    """Of replies that look alike, as those asked for at once may: the last one with these calls, to this question, or
    with this very text."""
    likeness = [
        (
            _ids_of(sent.shown) == _ids_of(message),
            sent.question == question,
            sent.shown["content"] == message["content"],
        )
        for sent in found
    ]
    return found[max(range(len(found)), key=lambda index: (likeness[index], index))]


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
