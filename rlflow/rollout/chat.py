"""The token side of one episode: replies to conversations, and every token that was sampled.

    messages -> the turn that they go on from -> prompt tokens -> engine -> reply, recorded as a Turn

Whoever speaks in messages (an environment, the gateway) comes here. A conversation that begins with an earlier one goes
on with its tokens as they were sampled, where the chat template keeps them; otherwise it begins anew: a fork where the
template rewrote history, a branch where the messages did.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlflow.envs.base import POLICY, ToolSchema
from rlflow.errors import NoReply, TemplateRefused
from rlflow.rollout.limits import EpisodeLimits
from rlflow.rollout.render import ChatRenderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import EpisodeEnd, Message, ToolCall, Turn

Value = TypeVar("Value")

MAX_UNTRAINED = 16
"""Replies of agents that are not trained, for each that the policy may give."""


class Generate(Protocol):
    """Samples one reply. Its exceptions are the engine's, and end the whole group."""

    def __call__(self, request: GenerateRequest, /) -> Awaitable[Completion]: ...


@dataclass(kw_only=True, slots=True)
class Reply:
    """What the policy said."""

    message: Message
    turn: Turn


@dataclass(kw_only=True, slots=True, frozen=True)
class _Said:
    """One turn, and the conversation up to and with its reply."""

    index: int
    """Of the turn in `Chat.turns`; -1 where it is not to be trained on."""
    messages: tuple[Message, ...]
    held_ids: list[int]


class Chat:
    """All conversations of one episode. Several replies may be under way at once."""

    def __init__(
        self,
        generate: Generate,
        renderer: ChatRenderer,
        limits: EpisodeLimits,
        *,
        seed: int | None = None,
        prefix_key: str | None = None,
        executor: Executor | None = None,
    ) -> None:
        """`seed` None samples unseeded. Templates and tokenizers run in `executor`; None: on the loop."""
        self._generate = generate
        self._renderer = renderer
        self._limits = limits
        self._seed = seed
        self._prefix_key = prefix_key
        self._executor = executor
        self._said: dict[bytes, _Said] = {}
        self._agents: set[tuple[str, bool]] = set()
        self._num_asked = 0
        self._num_asked_policy = 0
        self.turns: list[Turn] = []
        """Those to train on, in the order in which they ended."""
        self.num_forks = 0
        self.num_branches = 0
        self.end: EpisodeEnd | None = None
        """Why the last reply that was asked for was refused, if it was."""
        self.end_detail = ""
        self.failure: BaseException | None = None
        """Of an engine or the template; the episode must not go on as if it had not been."""
        self.last: tuple[Message, ...] = ()
        """The policy's conversation that a reply was last added to."""
        self.phase = "set-up"
        """For people: what is under way."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        agent: str = POLICY,
        trainable: bool = True,
        max_new_tokens: int | None = None,
    ) -> Reply:
        """Sample the reply of `agent` to a conversation.

        Only a `trainable` agent's tokens are recorded in `turns`. Raises NoReply when a limit of the episode forbids
        it (`end` says which), TemplateRefused for a conversation that the chat template does not take, and what the
        engine raises (which `failure` keeps).
        """
        assert messages, "a conversation has at least one message"
        number = self._begin(agent, trainable)
        try:
            prompt_ids, parent, keys = await self._prompt(messages, tools, agent, trainable)
            request = self._request(prompt_ids, number, max_new_tokens)
            completion = await self._generate(request)
            return await self._record(number, messages, prompt_ids, parent, keys, completion, trainable)
        except (NoReply, TemplateRefused):
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _begin(self, agent: str, trainable: bool) -> int:
        """The number of this reply within the episode."""
        if trainable:
            if self._num_asked_policy >= self._limits.max_turns:
                raise self._refuse(EpisodeEnd.MAX_TURNS, f"{self._limits.max_turns} replies (env.max_turns)")
            self._num_asked_policy += 1
            self.phase = f"generation of reply {self._num_asked_policy}"
        else:
            if self._num_asked - self._num_asked_policy >= MAX_UNTRAINED * self._limits.max_turns:
                raise self._refuse(EpisodeEnd.MAX_TURNS, f"{MAX_UNTRAINED} times env.max_turns replies of other agents")
            self.phase = f"generation of a reply of {agent}"
        self._num_asked += 1
        return self._num_asked - 1

    async def _prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], agent: str, trainable: bool
    ) -> tuple[list[int], _Said | None, list[bytes]]:
        """The prompt's tokens, the turn that they go on from, and a key for each beginning of the conversation."""
        keys = _keys([agent, trainable, list(tools)], messages)
        parent = next((self._said[key] for key in reversed(keys) if key in self._said), None)
        added = None
        if parent is not None:
            known = len(parent.messages)
            added = await self._aside(self._renderer.extend, parent.held_ids, messages[:known], messages[known:], tools)
            self.num_forks += added is None and trainable
        elif trainable and (agent, trainable) in self._agents:
            self.num_branches += 1
        self._agents.add((agent, trainable))
        if parent is not None and added is not None:
            return parent.held_ids + added, parent, keys
        return await self._aside(self._renderer.prompt, messages, tools), None, keys

    def _request(self, prompt_ids: list[int], number: int, max_new_tokens: int | None) -> GenerateRequest:
        room = self._limits.max_length - len(prompt_ids)
        if room <= 0:
            size = f"the prompt has {len(prompt_ids)} tokens"
            detail = f"{size}, which leaves no room within model.max_length ({self._limits.max_length})"
            raise self._refuse(EpisodeEnd.TRUNCATED_LENGTH if self.turns else EpisodeEnd.PROMPT_TOO_LONG, detail)
        seed = self._seed if self._seed is None or number == 0 else episode_seed(self._seed, number)
        return GenerateRequest(
            prompt_ids=prompt_ids,
            seed=seed,
            max_new_tokens=min(self._limits.max_new_tokens, room, max_new_tokens or room),
            prefix_key=self._prefix_key,
        )

    async def _record(
        self,
        number: int,
        messages: Sequence[Message],
        prompt_ids: list[int],
        parent: _Said | None,
        keys: list[bytes],
        completion: Completion,
        trainable: bool,
    ) -> Reply:
        sizes = [len(completion.ids), len(completion.logprobs), len(completion.versions)]
        assert len(set(sizes)) == 1, f"numbers of tokens, log-probabilities and versions differ: {sizes}"
        if not completion.ids:
            raise self._refuse(EpisodeEnd.EMPTY_COMPLETION, f"{self.phase} gave no token")
        text = await self._aside(self._renderer.parse, completion.ids)
        calls = [
            ToolCall(id=f"call_{number}_{index}", type="function", function=function)
            for index, function in enumerate(self._renderer.calls(text))
        ]
        message = Message(role="assistant", content=text)
        if calls:
            message["tool_calls"] = calls
        new = messages[len(parent.messages) :] if parent is not None else messages
        turn = Turn(
            prompt_ids=prompt_ids,
            output_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            continues=parent.index if parent is not None and trainable else None,
            anchor=anchor_of(new),
        )
        conversation = (*messages, message)
        index = len(self.turns) if trainable else -1
        if trainable:
            self.turns.append(turn)
            self.last = conversation
        said = _Said(index=index, messages=conversation, held_ids=prompt_ids + completion.ids)
        self._said[_next_key(keys[-1], message)] = said
        self.end, self.end_detail = None, ""
        return Reply(message=message, turn=turn)

    def _refuse(self, end: EpisodeEnd, detail: str) -> NoReply:
        self.end, self.end_detail = end, detail
        return NoReply(detail)

    async def _aside(self, function: Callable[..., Value], *arguments: object) -> Value:
        if self._executor is None:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def episode_seed(seed: int, index: int) -> int:
    """Seed of episode `index` of a group, or of reply `index` of an episode; 31 bits.

    Example: episode_seed(7, 2) == 7000023
    """
    return (seed * 1000003 + index) & 0x7FFFFFFF


def anchor_of(messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that are the same for the same messages (the anchor state of GiGPO, arXiv:2505.10978)."""
    text = json.dumps([[message["role"], message["content"]] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _keys(context: list[object], messages: Sequence[Message]) -> list[bytes]:
    """A key for each beginning of a conversation, of one message, of two, ...; equal for equal beginnings only."""
    key = hashlib.blake2b(json.dumps(context, sort_keys=True).encode(), digest_size=16).digest()
    keys = []
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.blake2b(key + json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()
