"""The actor that plays groups of episodes and has them scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from rlflow.config import Config
from rlflow.disk import disk_errors
from rlflow.envs.base import Environment
from rlflow.rollout import payloads as payload_files
from rlflow.rollout.client import EngineClient, EngineHandle
from rlflow.rollout.episode import (
    ChatRenderer,
    EpisodeLimits,
    PlayedEpisode,
    environment_failed,
    episode_seed,
    play_episode,
    summarize,
)
from rlflow.types import EpisodePayload, EpisodeSummary, GroupOrder, Message, PlayedGroup, Span, Task, Verdict

ACTOR = "runner"


class _RemoteScore(Protocol):
    def remote(self, task: Task, text: str, /) -> Awaitable[Verdict]: ...


class RewardHandle(Protocol):
    """A Ray actor handle of a RewardWorker, or anything shaped like it."""

    @property
    def score(self) -> _RemoteScore: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class _Scored:
    """One episode of a group, played and scored."""

    payload: EpisodePayload
    summary: EpisodeSummary
    played_at_s: float
    scored_at_s: float | None
    """None when the episode ended in an error and so was not scored."""


class EpisodeRunner:
    """Plays whole groups; many at a time, so wrap it with a high `max_concurrency`.

    `renderer` and `cancel` are for use without Ray: None reads the model's tokenizer, and cancels through Ray.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        build: Callable[[], Environment],
        reward: RewardHandle,
        *engines: EngineHandle,
        renderer: ChatRenderer | None = None,
        cancel: Callable[[object], None] | None = None,
    ) -> None:
        self._limits = EpisodeLimits.of(config)
        self._is_seeded = config.rollout.seeded
        self._build = build
        self._reward = reward
        self._client = EngineClient(engines, cancel=cancel or _ray_cancel)
        self._renderer = renderer or _load_renderer(model_path)

    async def play(self, order: GroupOrder) -> tuple[PlayedGroup | EpisodePayload, ...]:
        """The group's metadata (its `payloads` empty), then the payload of each episode.

        Call it with num_returns = 1 + order.num_episodes: the caller then owns each payload. An exception of an engine
        or of the reward actor loses the group; the other episodes are cancelled and closed first.
        """
        start_s = time.time()
        tasks = [asyncio.create_task(self._play_and_score(order, index)) for index in range(order.num_episodes)]
        try:
            episodes = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        played_at_s = max(episode.played_at_s for episode in episodes)
        group = PlayedGroup(
            group_id=order.group_id,
            episodes=[episode.summary for episode in episodes],
            payloads=[],
            num_bytes=sum(payload_files.payload_bytes(episode.payload) for episode in episodes),
            spans=[Span(actor=ACTOR, name="rollout", start_s=start_s, end_s=played_at_s), *_reward_spans(episodes)],
        )
        return (group, *(episode.payload for episode in episodes))

    async def transcript(self, payload: EpisodePayload) -> list[Message]:
        """The conversation of one episode."""
        return payload.messages

    async def save_payloads(self, path: Path, *payloads: EpisodePayload) -> None:
        with disk_errors("a checkpoint", path.parent):
            await asyncio.to_thread(payload_files.save_payloads, path, payloads)

    async def load_payloads(self, path: Path) -> tuple[int | EpisodePayload, ...]:
        """The number of payloads in a file, then the payloads in the order in which they were saved.

        Call it with num_returns = 1 + that number: the caller then owns each payload, and the first value says that all
        were read.
        """
        payloads = await asyncio.to_thread(payload_files.load_payloads, path)
        return (len(payloads), *payloads)

    async def _play_and_score(self, order: GroupOrder, index: int) -> _Scored:
        played = await self._play(order, index)
        played_at_s = time.time()
        verdict = None if played.end.is_error else await self._reward.score.remote(order.task, played.reply)
        return _Scored(
            payload=played.payload,
            summary=summarize(played, verdict),
            played_at_s=played_at_s,
            scored_at_s=None if verdict is None else time.time(),
        )

    async def _play(self, order: GroupOrder, index: int) -> PlayedEpisode:
        try:
            environment = self._build()
        except Exception as error:
            return environment_failed("build", error)
        return await play_episode(
            environment,
            order.task,
            self._client.generate,
            self._renderer,
            self._limits,
            seed=episode_seed(order.seed, index) if self._is_seeded else None,
            prefix_key=str(order.group_id),
        )


def _reward_spans(episodes: Sequence[_Scored]) -> list[Span]:
    """When at least one episode was being scored."""
    intervals = sorted((one.played_at_s, one.scored_at_s) for one in episodes if one.scored_at_s is not None)
    merged: list[tuple[float, float]] = []
    for start_s, end_s in intervals:
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return [Span(actor=ACTOR, name="reward", start_s=start_s, end_s=end_s) for start_s, end_s in merged]


def _load_renderer(model_path: str) -> ChatRenderer:
    # Only the actor needs transformers, which takes seconds to import.
    from transformers import AutoTokenizer

    from rlflow.rollout.render import Renderer

    return Renderer(AutoTokenizer.from_pretrained(model_path))


def _ray_cancel(call: object) -> None:
    import ray

    ray.cancel(cast(ray.ObjectRef, call))
