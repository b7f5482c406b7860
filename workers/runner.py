"""The actor that plays groups of episodes and has them scored.

    GroupOrder -> episodes side by side (play -> score) -> PlayedGroup for the driver, payloads for the object store

Rules: a group is returned whole or not at all. If one of its episodes raises, or the group becomes too old, the other
episodes are cancelled and their environments closed first. An episode is not to blame for an engine that is silent: the
group is lost, and is played again.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from rlflow.config import Config
from rlflow.errors import EngineLost, StaleGroup
from rlflow.models.opening import open_tokenizer
from rlflow.rewards.client import Scorer
from rlflow.rollout import payloads as payload_files
from rlflow.rollout.chat import Chat, episode_seed
from rlflow.rollout.client import EngineClient, EngineHandle, RemoteCalls
from rlflow.rollout.episode import EnvironmentSource, ProgramGateway, play_episode, summarize, unless
from rlflow.rollout.render import ChatRenderer, Renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.samples import NO_VERSION
from rlflow.runtime.clock import now
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.derived import is_seeded
from rlflow.runtime.disk import disk_errors
from rlflow.types import EpisodeEnd, EpisodePayload, EpisodeSummary, GroupOrder, Message, PlayedGroup, Span

ACTOR = "runner"


@dataclass(kw_only=True, slots=True, frozen=True)
class _Scored:
    """One episode of a group, played and scored."""

    payload: EpisodePayload
    summary: EpisodeSummary
    played_at_s: float
    scored_at_s: float | None
    """None when the episode ended in an error and so was not scored."""


@dataclass(kw_only=True, slots=True, eq=False)
class _UnderWay:
    """A group that is being played."""

    order: GroupOrder
    oldest_version: int | None = None
    """The oldest of any token, whose age is that of its cache, by whole parts; None before the first part."""
    num_parts: int = 0
    num_crowded: int = 0
    """Parts that came from an engine in which other replies waited for room."""
    too_old: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no update may use the group any more."""

    def note(self, part: Completion) -> None:
        self.num_parts += 1
        self.num_crowded += part.is_crowded
        known = [] if self.oldest_version is None else [self.oldest_version]
        self.oldest_version = min((*known, *part.cache_versions), default=None)


class EpisodeRunner:
    """Plays whole groups, many at a time, so it needs a high `max_concurrency` as an actor.

    `renderer` None loads the model's tokenizer, which then works in a thread; `calls` None calls the engines through
    Ray. Programs need a `gateway`.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        environments: EnvironmentSource,
        scorer: Scorer,
        *engines: EngineHandle,
        renderer: ChatRenderer | None = None,
        calls: RemoteCalls | None = None,
        gateway: ProgramGateway | None = None,
    ) -> None:
        self._config = config
        self._environments = environments
        self._gateway = gateway
        self._scorer = scorer
        self._client = EngineClient(engines, calls or _calls_through_ray(), patience_s=config.deadlines.start_s)
        self._under_way: set[_UnderWay] = set()
        self._rendering = None
        if renderer is None:
            renderer = Renderer(open_tokenizer(model_path, trust=config.model.trust_remote_code))
            # One thread, because tokenizers are not safe to share between threads.
            self._rendering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._renderer = renderer

    async def play(self, order: GroupOrder) -> tuple[PlayedGroup | EpisodePayload, ...]:
        """The group's metadata (its `payloads` empty), then the payload of each episode.

        Call it with num_returns = 1 + order.num_episodes, so that the caller owns each payload. Raises StaleGroup if
        `cancel_stale` ended the group, and whatever an engine or the scorer raises.
        """
        start_s = now()
        group = _UnderWay(order=order)
        self._under_way.add(group)
        try:
            episodes = await self._play_all(group)
        finally:
            self._under_way.discard(group)
        played_at_s = max(episode.played_at_s for episode in episodes)
        played = PlayedGroup(
            group_id=order.group_id,
            episodes=[episode.summary for episode in episodes],
            payloads=[],
            num_bytes=sum(payload_files.payload_bytes(episode.payload) for episode in episodes),
            spans=[
                Span(actor=ACTOR, name="rollout", start_s=start_s, end_s=played_at_s, facts=_facts(order, episodes)),
                *_reward_spans(order, episodes),
            ],
            crowded_share=group.num_crowded / max(1, group.num_parts),
        )
        return (played, *(episode.payload for episode in episodes))

    async def cancel_stale(self, oldest_version: int) -> None:
        """End the groups under way with a token older than `oldest_version`: their `play` raises StaleGroup.

        Groups pinned to an engine go on. The tokens of a part count when the engine has returned it.
        """
        for group in self._under_way:
            is_pinned = group.order.engine is not None
            if not is_pinned and group.oldest_version is not None and group.oldest_version < oldest_version:
                group.too_old.set()

    async def set_serving(self, engines: Collection[int]) -> None:
        """Send requests that name no engine to these engines only."""
        self._client.set_serving(engines)

    async def transcript(self, payload: EpisodePayload) -> list[Message]:
        """The conversation of one episode."""
        return payload.messages

    async def save_payloads(self, path: Path, *payloads: EpisodePayload) -> str:
        with disk_errors("a checkpoint", path.parent):
            return await asyncio.to_thread(payload_files.save_payloads, path, payloads)

    async def load_payloads(self, path: Path) -> tuple[int | EpisodePayload, ...]:
        """The number of payloads in a file, then the payloads in the order in which they were saved.

        Call it with num_returns = 1 + that number, so that the caller owns each payload; the first value says that all
        of them were read.
        """
        payloads = await asyncio.to_thread(payload_files.load_payloads, path)
        return (len(payloads), *payloads)

    async def _play_all(self, group: _UnderWay) -> list[_Scored]:
        """All episodes of a group. None of them is still running when this returns or raises."""
        episodes = [self._play_and_score(group, index) for index in range(group.order.num_episodes)]
        return await unless(
            group.too_old.wait(),
            all_or_none(episodes),
            lambda: StaleGroup(f"group {group.order.group_id} holds tokens of version {group.oldest_version}"),
        )

    async def _play_and_score(self, group: _UnderWay, index: int) -> _Scored:
        order, clock = group.order, asyncio.get_running_loop().time
        silence_s = 0.0

        async def generate(request: GenerateRequest) -> Completion:
            nonlocal silence_s
            heard_s = clock()

            def sampled(part: Completion) -> None:
                nonlocal heard_s
                heard_s = clock()
                group.note(part)

            is_greedy = order.is_last_greedy and index == order.num_episodes - 1
            try:
                return await self._client.generate(replace(request, engine=order.engine, is_greedy=is_greedy), sampled)
            except asyncio.CancelledError:
                silence_s = max(silence_s, clock() - heard_s)
                raise

        chat = Chat(
            generate,
            self._renderer,
            self._config,
            seed=episode_seed(order.seed, index) if is_seeded(self._config) else None,
            prefix_key=str(order.group_id),
            executor=self._rendering,
        )
        played = await play_episode(
            self._environments, order.task, chat, self._config, seed=order.seed, gateway=self._gateway
        )
        limits = self._config.env
        limit_s = limits.setup_timeout_s if played.end is EpisodeEnd.SETUP_TIMEOUT else limits.episode_timeout_s
        if played.end.is_error and silence_s > limit_s / 2:
            raise EngineLost(f"an episode waited {silence_s:.0f} s for a token, and failed: {played.detail}")
        if played.end is EpisodeEnd.EPISODE_TIMEOUT and not self._client.is_served:
            raise EngineLost("all rollout engines were lost, and none was back before the episode ran out of time")
        played_at_s = now()
        verdict = None if played.end.is_error else await self._scorer.score(played.transcript)
        return _Scored(
            payload=played.payload,
            summary=summarize(played, verdict),
            played_at_s=played_at_s,
            scored_at_s=None if verdict is None else now(),
        )


def _facts(order: GroupOrder, episodes: Sequence[_Scored]) -> dict[str, int | str]:
    summaries = [episode.summary for episode in episodes]
    ends = Counter(summary.end.value for summary in summaries)
    sampled = [summary for summary in summaries if summary.num_loss_tokens]
    return {
        "group": order.group_id,
        "version": max((summary.newest_version for summary in sampled), default=NO_VERSION),
        "oldest_version": min((summary.oldest_version for summary in sampled), default=NO_VERSION),
        "tokens": sum(summary.num_completion_tokens for summary in summaries),
        "outcome": ", ".join(f"{count} {end}" for end, count in ends.most_common()),
    }


def _reward_spans(order: GroupOrder, episodes: Sequence[_Scored]) -> list[Span]:
    """The times during which at least one episode was being scored."""
    spans: list[Span] = []
    for start_s, end_s in sorted((e.played_at_s, e.scored_at_s) for e in episodes if e.scored_at_s is not None):
        if spans and start_s <= spans[-1].end_s:
            start_s, end_s = spans[-1].start_s, max(spans.pop().end_s, end_s)
        facts: dict[str, int | str] = {"group": order.group_id}
        spans.append(Span(actor=ACTOR, name="reward", start_s=start_s, end_s=end_s, facts=facts))
    return spans


def _calls_through_ray() -> RemoteCalls:
    import ray
    from ray.exceptions import RayActorError

    return RemoteCalls(
        cancel=lambda call: ray.cancel(cast(ray.ObjectRef, call)),
        is_lost=lambda error: isinstance(error, RayActorError | EngineLost),
    )
