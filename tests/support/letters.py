"""A renderer whose tokens are letters, and an engine that answers with a script."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlflow.config import Config, EnvConfig, ModelConfig, RolloutConfig
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.rollout.tool_calls import CallStyle, find_calls
from rlflow.types import FunctionCall, Json, Message

STOP, OPEN, AB = ord("."), ord(">"), 1000


class LetterRenderer:
    """One token a letter, but "ab" is one token; a message is its text and ".", a prompt ends with ">"."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]] = ()) -> list[int]:
        text = "".join(f"{message['content']}." for message in messages)
        letters = [ord(letter) for letter in text.replace("ab", chr(AB))]
        return [*([ord("T")] if tools else []), *letters, OPEN]

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Json]] = (),
    ) -> list[int] | None:
        return self.prompt(new_messages)

    def given(self, messages: Sequence[Message], reply: Message, tools: Sequence[dict[str, Json]] = ()) -> list[int]:
        return [*ids_of(reply["content"]), STOP]

    def parse(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != STOP)

    def calls(self, text: str, tools: Sequence[dict[str, Json]] = ()) -> list[FunctionCall]:
        return find_calls(text, CallStyle.TAGGED)


def ids_of(text: str) -> list[int]:
    """As an engine samples them: letter by letter, where the renderer would write another token for "ab"."""
    return [ord(letter) for letter in text]


@dataclass
class ScriptedEngine:
    """Answers with the scripted replies in turn; the version says which. Holds back while `is_open` is not set."""

    replies: list[str | Exception]
    finish_reason: FinishReason = "stop"
    requests: list[GenerateRequest] = field(default_factory=list)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0

    async def __call__(self, request: GenerateRequest, /) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reply = self.replies[number]
        if isinstance(reply, Exception):
            raise reply
        ids = ids_of(reply)[: request.max_new_tokens]
        return Completion(
            ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[number] * len(ids),
            cache_versions=[number] * len(ids),
            finish_reason=self.finish_reason,
        )


def limits(
    *,
    max_length: int = 4096,
    max_new_tokens: int = 1024,
    max_turns: int = 8,
    max_observation_chars: int = 1000,
    setup_s: float = 9.0,
    step_s: float = 9.0,
    episode_s: float = 9.0,
) -> Config:
    env = EnvConfig(
        max_turns=max_turns,
        max_observation_chars=max_observation_chars,
        setup_timeout_s=setup_s,
        step_timeout_s=step_s,
        episode_timeout_s=episode_s,
    )
    return Config(
        model=ModelConfig(max_length=max_length), rollout=RolloutConfig(max_new_tokens=max_new_tokens), env=env
    )
