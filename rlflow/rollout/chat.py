"""The token side of one episode: replies to conversations, and a record of every token that was sampled.

    messages -> the turn that they continue -> prompt tokens -> engine -> reply, recorded as a Turn

Rules: sampled tokens are never tokenised again. A conversation that begins with an earlier one continues with the
tokens of that one as they were sampled. If the chat template does not keep them it begins anew, as a fork; if the
messages themselves differ from all earlier ones, as a branch. Environments and the gateway speak in messages only.

Example: reply([user "2+2"]) samples "4" as turn 0. reply([user "2+2", assistant "4", user "3+3"]) continues turn 0: its
prompt is the tokens of turn 0 and then those of the new message.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias, TypeVar

from rlflow.config import Config
from rlflow.envs.base import POLICY, ToolSchema
from rlflow.errors import EnvironmentFailure, NoReply, TemplateRefused
from rlflow.rollout.images import Album
from rlflow.rollout.render import ChatRenderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.samples import turn_of
from rlflow.rollout.stopping import stopped
from rlflow.types import NO_VERSION, EpisodeEnd, FunctionCall, ImageSpan, Message, ToolCall, Turn

Value = TypeVar("Value")

MAX_UNTRAINED = 16
"""Other agents may give this many replies for each reply that the policy may give."""


Generate: TypeAlias = Callable[[GenerateRequest], Awaitable[Completion]]
"""Samples one reply. Its exceptions end the whole group."""


@dataclass(kw_only=True, slots=True)
class Reply:
    """A reply as a message and as tokens."""

    message: Message
    turn: Turn


@dataclass(kw_only=True, slots=True, frozen=True)
class _Said:
    """A turn, with the conversation that ends with its reply."""

    index: int
    """The turn's place in `Chat.turns`; -1 if it is not trained on."""
    messages: tuple[Message, ...]
    held_ids: list[int]
    num_routed: int
    """Tokens at the start of `held_ids` whose experts are known."""
    images: tuple[ImageSpan, ...]
    """Those in `held_ids`."""


class Chat:
    """All conversations of one episode. Several replies may be under way at once."""

    def __init__(
        self,
        generate: Generate,
        renderer: ChatRenderer,
        config: Config,
        *,
        seed: int | None = None,
        prefix_key: str | None = None,
        executor: Executor | None = None,
        album: Album | None = None,
        hint: Callable[[Sequence[Message]], list[Message]] | None = None,
    ) -> None:
        """`seed` None samples without a seed; `executor` None runs templates and tokenizers in the event loop.

        `album`: the images of the group; None for a model that takes none. `hint`: a conversation as the teacher is
        told it; None if it reads what the policy read.
        """
        self._generate = generate
        self._renderer = renderer
        self._config = config
        self._seed = seed
        self._prefix_key = prefix_key
        self._executor = executor
        self._album = album or Album(None)
        self._hint = hint
        self._hint_tokens = 0
        """How much longer the teacher's prompt is."""
        self.template_args = config.rollout.template_args
        """What every conversation tells the chat template."""
        self._said: dict[bytes, _Said] = {}
        self._agents: set[tuple[str, bool]] = set()
        self._num_asked = 0
        self._num_asked_policy = 0
        self.turns: list[Turn] = []
        """The turns to train on, in the order in which they ended."""
        self.num_forks = 0
        self.num_branches = 0
        self.end: EpisodeEnd | None = None
        """Why the last request was refused; None if it was not."""
        self.end_detail = ""
        self.failure: BaseException | None = None
        """The exception of an engine or the template, after which the episode must not go on."""
        self.last: tuple[Message, ...] = ()
        """The conversation with the policy's latest reply."""
        self.phase = "set-up"
        """What is under way, for messages to users."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        agent: str = POLICY,
        trainable: bool = True,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        given: Message | None = None,
    ) -> Reply:
        """Sample the reply of `agent` to a conversation, or record the one that is `given`.

        The reply ends with the token that completes one of `stop`, which is part of its text.
        Only a `trainable` agent's tokens are recorded in `turns`. Raises NoReply if a limit of the episode forbids the
        reply (`end` says which), TemplateRefused if the chat template does not take the conversation,
        EnvironmentFailure for a text that spells an image's token, and whatever the engine raises (`failure` keeps it).
        """
        assert messages, "a conversation has at least one message"
        number = self._begin(agent, trainable, is_given=given is not None)
        try:
            keys = _keys([agent, trainable, list(tools)], messages)
            parent = next((self._said[key] for key in reversed(keys) if key in self._said), None)
            added, album, told = None, self._album, None
            if parent is not None:
                known, held_ids = len(parent.messages), album.held_in(parent.held_ids, parent.images)
                added = await self._aside(self._renderer.extend, held_ids, messages[:known], messages[known:], tools)
                self.num_forks += added is None and trainable
            else:
                self.num_branches += trainable and (agent, trainable) in self._agents
            self._agents.add((agent, trainable))
            if parent is not None and added is not None:
                added, images = album.written_out(added, messages[len(parent.messages) :], len(parent.held_ids))
                prompt_ids, images = parent.held_ids + added, parent.images + images
            else:
                parent, written = None, await self._aside(self._renderer.prompt, messages, tools)
                prompt_ids, images = album.written_out(written, messages, 0)
                if self._hint is not None and trainable:
                    told = await self._aside(self._renderer.prompt, self._hint(messages), tools)
                    self._hint_tokens = max(self._hint_tokens, len(told) - len(prompt_ids))
            request = self._request(prompt_ids, images, number, max_new_tokens, parent)
            if given is None:
                completion = await self._generate(request)
                if stop:
                    completion = await self._aside(stopped, completion, request, stop, self._renderer.parse)
            else:
                ids = await self._aside(self._renderer.given, messages, given, tools)
                completion = self._demonstrated(ids, request)
            reply = await self._record(number, messages, tools, request, parent, keys[-1], completion, trainable)
            reply.turn.teacher_prompt_ids = told
            return reply
        except (NoReply, TemplateRefused, EnvironmentFailure):
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise

    async def count(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """Tokens of a conversation that begins anew, up to its next reply. Raises TemplateRefused."""
        return len(await self._aside(self._renderer.prompt, messages, tools))

    async def taken_up(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of an environment, with the keys of their images. Raises EnvironmentFailure for an image that cannot
        be shown."""
        if not any("parts" in message for message in messages):
            return list(messages)
        return await self._aside(self._album.taken_up, messages)

    def has_room_for(self, replies: int) -> bool:
        """Whether the episode may have as many further replies of the policy."""
        return self._num_asked_policy + replies <= self._config.env.max_turns

    def _begin(self, agent: str, trainable: bool, *, is_given: bool) -> int:
        """Count a reply, within the limits of what may be sampled; returns its number in the episode."""
        max_turns = self._config.env.max_turns
        if trainable:
            if self._num_asked_policy >= max_turns and not is_given:
                raise self._refuse(EpisodeEnd.MAX_TURNS, f"{max_turns} replies (env.max_turns)")
            self._num_asked_policy += 1
            self.phase = f"generation of reply {self._num_asked_policy}"
        else:
            if self._num_asked - self._num_asked_policy >= MAX_UNTRAINED * max_turns:
                raise self._refuse(EpisodeEnd.MAX_TURNS, f"{MAX_UNTRAINED} times env.max_turns replies of other agents")
            self.phase = f"generation of a reply of {agent}"
        self._num_asked += 1
        return self._num_asked - 1

    def _request(
        self,
        prompt_ids: list[int],
        images: tuple[ImageSpan, ...],
        number: int,
        max_new_tokens: int | None,
        parent: _Said | None,
    ) -> GenerateRequest:
        room = self._config.model.max_length - len(prompt_ids) - self._hint_tokens
        if room <= 0:
            size = f"the prompt has {len(prompt_ids)} tokens"
            if self._hint_tokens:
                size += f", and with what the teacher is told besides {len(prompt_ids) + self._hint_tokens}"
            detail = f"{size}, which leaves no room within model.max_length ({self._config.model.max_length})"
            raise self._refuse(EpisodeEnd.TRUNCATED_LENGTH if self.turns else EpisodeEnd.PROMPT_TOO_LONG, detail)
        seed = self._seed if self._seed is None or number == 0 else episode_seed(self._seed, number)
        return GenerateRequest(
            prompt_ids=prompt_ids,
            seed=seed,
            max_new_tokens=min(self._config.rollout.max_new_tokens, room, max_new_tokens or room),
            prefix_key=self._prefix_key,
            num_routed=0 if parent is None else parent.num_routed,
            images=images,
            pictures=self._album.handles(images),
        )

    def _demonstrated(self, ids: list[int], request: GenerateRequest) -> Completion:
        """A reply that no policy of this run has sampled. Raises NoReply if it is longer than model.max_length."""
        length = len(request.prompt_ids) + len(ids) + self._hint_tokens
        if length > self._config.model.max_length:
            limit = f"model.max_length ({self._config.model.max_length})"
            raise self._refuse(EpisodeEnd.PROMPT_TOO_LONG, f"a demonstration has {length} tokens, more than {limit}")
        nobody = [NO_VERSION] * len(ids)
        return Completion(
            ids=ids, logprobs=[0.0] * len(ids), versions=nobody, cache_versions=nobody, finish_reason="stop"
        )

    async def _record(
        self,
        number: int,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        request: GenerateRequest,
        parent: _Said | None,
        key: bytes,
        completion: Completion,
        trainable: bool,
    ) -> Reply:
        sizes = [
            len(each) for each in (completion.ids, completion.logprobs, completion.versions, completion.cache_versions)
        ]
        assert len(set(sizes)) == 1, f"numbers of tokens, log-probabilities and versions differ: {sizes}"
        if not completion.ids:
            raise self._refuse(EpisodeEnd.EMPTY_COMPLETION, f"{self.phase} gave no token")
        text, found = await self._aside(self._read, completion.ids, tools)
        calls = [
            ToolCall(id=f"call_{number}_{index}", type="function", function=function)
            for index, function in enumerate(found)
        ]
        message = Message(role="assistant", content=text)
        if calls:
            message["tool_calls"] = calls
        turn = replace(
            turn_of(request, completion),
            continues=parent.index if parent is not None and trainable else None,
            anchor=anchor_of(messages[len(parent.messages) :] if parent is not None else messages),
        )
        index = len(self.turns) if trainable else -1
        said = _Said(
            index=index,
            messages=(*messages, message),
            held_ids=request.prompt_ids + completion.ids,
            num_routed=request.num_routed + completion.num_routes,
            images=request.images,
        )
        if trainable:
            self.turns.append(turn)
            self.last = said.messages
        self._said[_next_key(key, message)] = said
        self.end, self.end_detail = None, ""
        return Reply(message=message, turn=turn)

    def _read(self, ids: list[int], tools: Sequence[ToolSchema]) -> tuple[str, list[FunctionCall]]:
        text = self._renderer.parse(ids)
        return text, self._renderer.calls(text, tools)

    def _refuse(self, end: EpisodeEnd, detail: str) -> NoReply:
        self.end, self.end_detail = end, detail
        return NoReply(detail)

    async def _aside(self, function: Callable[..., Value], *arguments: object) -> Value:
        if self._executor is None:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def episode_seed(seed: int, index: int) -> int:
    """The seed of episode `index` of a group, or of reply `index` of an episode; 31 bits.

    Example: episode_seed(7, 2) == 7000023
    """
    return (seed * 1000003 + index) & 0x7FFFFFFF


def anchor_of(messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that are the same for the same messages (the anchor state of GiGPO, arXiv:2505.10978)."""
    text = json.dumps([[message["role"], message.get("parts", message["content"])] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _keys(context: list[object], messages: Sequence[Message]) -> list[bytes]:
    """A key for each beginning of a conversation (one message, two, ...); equal for equal beginnings only."""
    first = hashlib.blake2b(json.dumps(context, sort_keys=True).encode(), digest_size=16).digest()
    return list(accumulate(messages, _next_key, initial=first))[1:]


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.blake2b(key + json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()
