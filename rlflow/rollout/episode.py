"""Playing one episode: the environment talks in messages, the engine in tokens.

Environment.reset -> prompt -> [generate -> reply -> Environment.step -> extended prompt] ... -> Turns -> Samples
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from rlflow.config import Config
from rlflow.envs.base import Environment, Step
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import EpisodeEnd, EpisodePayload, EpisodeSummary, Message, Sample, Task, Turn, TurnSummary, Verdict

CLOSE_TIMEOUT_S = 30.0
NO_VERSION = -1

Result = TypeVar("Result")


class Generate(Protocol):
    """Samples one reply. Its exceptions are the engine's, and end the whole group."""

    def __call__(self, request: GenerateRequest, /) -> Awaitable[Completion]: ...


class ChatRenderer(Protocol):
    """Messages <-> tokens; see `rlflow.rollout.render.Renderer`."""

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(
        self, held_ids: Sequence[int], messages_so_far: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int] | None: ...

    def parse(self, ids: Sequence[int]) -> str: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeLimits:
    max_length: int
    """Tokens of prompt and completion together."""
    max_new_tokens: int
    """Sampled tokens of one reply."""
    timeout_s: float
    """Seconds for the whole episode, generation included."""

    @classmethod
    def of(cls, config: Config) -> EpisodeLimits:
        return cls(
            max_length=config.model.max_length,
            max_new_tokens=config.rollout.max_new_tokens,
            timeout_s=config.rollout.episode_timeout_s,
        )


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """One episode before it is scored."""

    end: EpisodeEnd
    payload: EpisodePayload
    reply: str
    """Text of the last reply, "" when there is none."""
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    turns: tuple[TurnSummary, ...] = ()


class EnvironmentFailure(Exception):
    """Code of the environment raised, or returned what it must not; the text says which call and what."""


def episode_seed(seed: int, index: int) -> int:
    """Seed of episode `index` of a group, or of reply `index` of an episode; 31 bits.

    Example: episode_seed(7, 2) == 7000023
    """
    return (seed * 1000003 + index) & 0x7FFFFFFF


def samples_of(turns: Sequence[Turn]) -> list[Sample]:
    """Turns as token sequences to train on: a turn whose prompt starts with all earlier tokens continues the sample.

    Example: turns (prompt P0 P1, output A0) and (prompt P0 P1 A0 O0, output B0) are one sample: prompt P0 P1,
    completion A0 O0 B0, loss mask 1 0 1. Had the second prompt been Q0, there would be two samples.
    """
    samples: list[Sample] = []
    start = 0
    held: list[int] = []
    for index, turn in enumerate(turns):
        if index > start and turn.prompt_ids[: len(held)] != held:
            samples.append(_sample(turns[start:index]))
            start = index
        held = turn.prompt_ids + turn.output_ids
    if turns:
        samples.append(_sample(turns[start:]))
    return samples


def _sample(turns: Sequence[Turn]) -> Sample:
    ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    num_prompt_tokens = len(turns[0].prompt_ids)
    for turn in turns:
        observed = turn.prompt_ids[num_prompt_tokens + len(ids) :]
        ids += observed + turn.output_ids
        loss_mask += [False] * len(observed) + [True] * len(turn.output_ids)
        logprobs += [0.0] * len(observed) + turn.logprobs
        versions += [NO_VERSION] * len(observed) + turn.versions
    return Sample(
        prompt_ids=np.array(turns[0].prompt_ids, dtype=np.int32),
        completion_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
    )


def summarize(played: PlayedEpisode, verdict: Verdict | None) -> EpisodeSummary:
    """Metadata of a played episode. `verdict` is None when the episode ended in an error and so was not scored.

    Token counts are over all samples; versions are -1 when nothing was sampled.
    """
    assert (verdict is None) == played.end.is_error, "exactly the episodes without an error are scored"
    end, reward, detail, metrics = played.end, None, played.detail, dict(played.metrics)
    if verdict is not None:
        no_verdict = EpisodeEnd.NO_VERDICT if verdict.reward is None else end
        end, reward, detail = verdict.end or no_verdict, verdict.reward, verdict.detail or detail
        metrics |= verdict.metrics
    samples = played.payload.samples
    versions = [int(version) for sample in samples for version in sample.versions[sample.loss_mask]]
    return EpisodeSummary(
        end=end,
        reward=reward,
        num_prompt_tokens=sum(len(sample.prompt_ids) for sample in samples),
        num_completion_tokens=sum(len(sample.completion_ids) for sample in samples),
        num_loss_tokens=len(versions),
        oldest_version=min(versions, default=NO_VERSION),
        newest_version=max(versions, default=NO_VERSION),
        detail=detail,
        metrics=metrics,
        turns=played.turns,
    )


def anchor_of(messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that are the same for the same messages (the anchor state of GiGPO, arXiv:2505.10978)."""
    text = json.dumps([[message["role"], message["content"]] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def environment_failed(call: str, error: Exception) -> PlayedEpisode:
    """The episode whose environment could not even be built."""
    return PlayedEpisode(
        end=EpisodeEnd.ENVIRONMENT_ERROR,
        payload=EpisodePayload(samples=[], messages=[]),
        reply="",
        detail=_describe(call, error),
    )


async def play_episode(
    environment: Environment,
    task: Task,
    generate: Generate,
    renderer: ChatRenderer,
    limits: EpisodeLimits,
    seed: int | None,
    prefix_key: str | None,
) -> PlayedEpisode:
    """Play one episode and close its environment, whatever happens.

    A failure of the environment is an outcome of the episode; an exception of `generate` or of the chat template is
    raised. `seed` None samples unseeded.
    """
    play = _Play(
        environment=environment, generate=generate, renderer=renderer, limits=limits, seed=seed, prefix_key=prefix_key
    )
    try:
        end, detail = await play.run(task)
    except BaseException as error:
        failure = await _close(environment)
        if failure:
            error.add_note(failure)
        raise
    failure = await _close(environment)
    if failure and not end.is_error:
        end, detail = EpisodeEnd.ENVIRONMENT_ERROR, failure
    samples = samples_of(play.turns)
    turns = tuple(
        TurnSummary(anchor=anchor, num_loss_tokens=len(turn.output_ids))
        for anchor, turn in zip(play.anchors, play.turns, strict=False)
    )
    counts = {"turns": float(len(play.turns)), "forks": float(max(0, len(samples) - 1))}
    return PlayedEpisode(
        end=end,
        payload=EpisodePayload(samples=samples, messages=play.messages),
        reply=play.reply,
        detail=detail,
        metrics=play.metrics | counts,
        turns=turns,
    )


@dataclass(kw_only=True, slots=True)
class _Play:
    """An episode under way; what it has recorded survives the exception that ends it."""

    environment: Environment
    generate: Generate
    renderer: ChatRenderer
    limits: EpisodeLimits
    seed: int | None
    prefix_key: str | None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    """For each turn, and for the one that is being sampled, what it goes by."""
    metrics: dict[str, float] = field(default_factory=dict)
    reply: str = ""
    phase: str = "reset"

    async def run(self, task: Task) -> tuple[EpisodeEnd, str]:
        """How the episode ended, and the detail of a failure."""
        deadline = asyncio.timeout(self.limits.timeout_s)
        try:
            async with deadline:
                return await self._turns(task)
        except EnvironmentFailure as failure:
            return EpisodeEnd.ENVIRONMENT_ERROR, str(failure)
        except TimeoutError:
            if not deadline.expired():
                raise
            limit = f"{self.limits.timeout_s:g} s (rollout.episode_timeout_s)"
            return EpisodeEnd.EPISODE_TIMEOUT, f"the episode took longer than {limit}; it was in {self.phase}"

    async def _turns(self, task: Task) -> tuple[EpisodeEnd, str]:
        self.messages += _checked_messages("reset", await _ask("reset", self.environment.reset, task))
        self.anchors.append(anchor_of(self.messages))
        prompt_ids = self.renderer.prompt(self.messages)
        max_length = self.limits.max_length
        if len(prompt_ids) >= max_length:
            size = f"the prompt has {len(prompt_ids)} tokens"
            return EpisodeEnd.PROMPT_TOO_LONG, f"{size}, which leaves no room within model.max_length ({max_length})"
        while len(prompt_ids) < max_length:
            completion = await self._sample(prompt_ids)
            if not completion.ids:
                return EpisodeEnd.EMPTY_COMPLETION, f"{self.phase} gave no token"
            self._add_reply(prompt_ids, completion)
            if completion.finish_reason == "length":
                # A reply that was cut off may hold half an action, so the environment does not act on it.
                return EpisodeEnd.TRUNCATED_LENGTH, ""
            self.phase = f"step {len(self.turns)}"
            step = _checked_step(await _ask("step", self.environment.step, self.messages[-1]))
            self.metrics |= step.metrics
            if step.done:
                self.messages += step.messages
                return EpisodeEnd.COMPLETED, ""
            self.anchors.append(anchor_of(step.messages))
            prompt_ids = self._next_prompt(step.messages)
        return EpisodeEnd.TRUNCATED_LENGTH, ""

    async def _sample(self, prompt_ids: list[int]) -> Completion:
        index = len(self.turns)
        self.phase = f"generation of reply {index + 1}"
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            seed=self.seed if self.seed is None or index == 0 else episode_seed(self.seed, index),
            max_new_tokens=min(self.limits.max_new_tokens, self.limits.max_length - len(prompt_ids)),
            prefix_key=self.prefix_key,
        )
        return await self.generate(request)

    def _add_reply(self, prompt_ids: list[int], completion: Completion) -> None:
        sizes = [len(completion.ids), len(completion.logprobs), len(completion.versions)]
        assert len(set(sizes)) == 1, f"numbers of tokens, log-probabilities and versions differ: {sizes}"
        self.reply = self.renderer.parse(completion.ids)
        self.messages.append(Message(role="assistant", content=self.reply))
        self.turns.append(
            Turn(
                prompt_ids=prompt_ids,
                output_ids=completion.ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
            )
        )

    def _next_prompt(self, new_messages: list[Message]) -> list[int]:
        held = self.turns[-1].prompt_ids + self.turns[-1].output_ids
        added = self.renderer.extend(held, self.messages, new_messages)
        self.messages += new_messages
        return self.renderer.prompt(self.messages) if added is None else held + added


async def _ask(call: str, method: Callable[..., Awaitable[Result]], *arguments: object) -> Result:
    try:
        return await method(*arguments)
    except Exception as error:
        raise EnvironmentFailure(_describe(call, error)) from error


async def _close(environment: Environment) -> str:
    """Close the environment; what went wrong, or ""."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await environment.close()
    except TimeoutError:
        return f"close: did not finish within {CLOSE_TIMEOUT_S:g} s"
    except Exception as error:
        return _describe("close", error)
    return ""


def _describe(call: str, error: Exception) -> str:
    return f"{call}: {type(error).__name__}: {error}"


def _checked_step(step: Step) -> Step:
    if not isinstance(step, Step):
        raise EnvironmentFailure(f"step: expected an Step; got {type(step).__name__}")
    for name, value in step.metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailure(f"step: metric {name!r} must be a finite number; got {value!r}")
    if step.messages or not step.done:
        _checked_messages("step", step.messages)
    return step


def _checked_messages(call: str, messages: list[Message]) -> list[Message]:
    if not messages:
        raise EnvironmentFailure(f"{call}: expected at least one message; got {messages!r}")
    for message in messages:
        shape = {key: type(value) for key, value in message.items()} if isinstance(message, dict) else {}
        if shape.get("role") is not str or shape.get("content") is not str:
            raise EnvironmentFailure(f"{call}: a message needs the texts `role` and `content`; got {message!r}")
    return messages
