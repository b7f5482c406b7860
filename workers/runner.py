"""The actor that plays groups of episodes and has them scored.

    GroupOrder -> episodes side by side (play -> score) -> what sees the whole group scores it
               -> PlayedGroup for the driver, payloads for the object store

Rules: a group is returned whole, but for its spare episodes, or not at all. If one of its episodes raises, or the group
becomes too old, the other episodes are cancelled and their environments closed first; so are the spare ones of a group
that is full. An episode is not to blame for an engine that is silent: the group is lost, and is played again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from rlflow.config import Config
from rlflow.errors import EngineLost, StaleGroup
from rlflow.models.images import ImageProcessor, open_images
from rlflow.rewards.client import Scorer
from rlflow.rollout import payloads as payload_files
from rlflow.rollout.chat import Chat, episode_seed
from rlflow.rollout.client import EngineClient, EngineHandle, RemoteCalls
from rlflow.rollout.demonstration import show
from rlflow.rollout.episode import EnvironmentSource, PlayedEpisode, ProgramGateway, play_episode, summarized, unless
from rlflow.rollout.hint import hinted
from rlflow.rollout.images import Album
from rlflow.rollout.render import ChatRenderer, open_renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.runtime.clock import now
from rlflow.runtime.concurrency import all_or_none, until_enough
from rlflow.runtime.derived import is_seeded
from rlflow.runtime.disk import disk_errors
from rlflow.types import (
    NO_VERSION,
    EpisodeEnd,
    EpisodePayload,
    EpisodeSummary,
    GroupOrder,
    Message,
    Pictures,
    PlayedGroup,
    Span,
    Task,
    Transcript,
    Verdict,
)

ACTOR = "runner"
_Scored: TypeAlias = tuple[PlayedEpisode, Verdict | None]
_Play: TypeAlias = Coroutine[Any, Any, _Scored]


@dataclass(kw_only=True, slots=True, eq=False)
class _UnderWay:
    """A group that is being played."""

    order: GroupOrder
    album: Album
    oldest_version: int | None = None
    """The oldest of any token, whose age is that of its cache, by whole parts; None before the first part."""
    num_parts: int = 0
    num_crowded: int = 0
    """Parts that came from an engine in which other replies waited for room."""
    played_at_s: float = 0.0
    """When the last of its episodes had been played."""
    scoring: list[tuple[float, float]] = field(default_factory=list)
    """From when to when something was being scored."""
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
    Ray. Programs need a `gateway`; `images` is the model's processor, if it takes some.
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
        images: ImageProcessor | None = None,
        gateway: ProgramGateway | None = None,
    ) -> None:
        self._config = config
        self._environments = environments
        self._gateway = gateway
        self._scorer = scorer
        self._share = _in_object_store if calls is None else lambda file: file
        self._client = EngineClient(engines, calls or _calls_through_ray(), patience_s=config.deadlines.start_s)
        self._under_way: set[_UnderWay] = set()
        self._rendering = None
        self._images = images
        if renderer is None:
            renderer = open_renderer(config, model_path)
            self._images = open_images(model_path, trust=config.model.trust_remote_code)
            # One thread, because tokenizers are not safe to share between threads.
            self._rendering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._renderer = renderer

    async def play(self, order: GroupOrder) -> tuple[PlayedGroup | EpisodePayload, ...]:
        """The group's metadata (its `payloads` empty), then the payload of each episode.

        Call it with num_returns = 1 + order.num_episodes, so that the caller owns each payload. Raises StaleGroup if
        `cancel_stale` ended the group, and whatever an engine or the scorer raises.
        """
        start_s = now()
        group = _UnderWay(order=order, album=Album(self._images, self._share))
        self._under_way.add(group)
        try:
            payloads, summaries = await unless(
                group.too_old.wait(),
                self._play_all(group),
                lambda: StaleGroup(f"group {group.order.group_id} holds tokens of version {group.oldest_version}"),
            )
        finally:
            self._under_way.discard(group)
        facts, files = _facts(order, summaries), group.album.files
        rollout = Span(actor=ACTOR, name="rollout", start_s=start_s, end_s=group.played_at_s, facts=facts)
        played = PlayedGroup(
            group_id=order.group_id,
            episodes=summaries,
            payloads=[],
            num_bytes=sum(map(payload_files.payload_bytes, payloads)) + sum(map(len, files.values())),
            spans=[rollout, *_reward_spans(group)],
            crowded_share=group.num_crowded / max(1, group.num_parts),
            num_images=len(files),
            pictures=files or None,
        )
        return (played, *payloads)

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

    async def save_payloads(self, path: Path, *payloads: EpisodePayload | Pictures) -> str:
        with disk_errors("a checkpoint", path.parent):
            return await asyncio.to_thread(payload_files.save_payloads, path, payloads)

    async def load_payloads(self, path: Path) -> tuple[int | EpisodePayload | Pictures, ...]:
        """The number of payloads in a file, then the payloads in the order in which they were saved.

        Call it with num_returns = 1 + that number, so that the caller owns each payload; the first value says that all
        of them were read.
        """
        payloads = await asyncio.to_thread(payload_files.load_payloads, path)
        return (len(payloads), *payloads)

    async def _play_all(self, group: _UnderWay) -> tuple[list[EpisodePayload], list[EpisodeSummary]]:
        """All episodes of a group. None of them is still running when this returns or raises."""
        plays = [self._play_and_score(group, index) for index in range(group.order.num_episodes)]
        episodes = await (first_ended(plays, group.order) if group.order.num_spare else all_or_none(plays))
        start_s = now()
        summaries = await summarized(self._scorer, episodes)
        if any(verdict is not None and verdict.awaits_group for _, verdict in episodes):
            group.scoring.append((start_s, now()))
        return [played.payload for played, _ in episodes], summaries

    async def _play_and_score(self, group: _UnderWay, index: int) -> tuple[PlayedEpisode, Verdict | None]:
        """The verdict is None when the episode ended in an error and so was not scored."""
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
            album=group.album,
            hint=self._hint_for(order),
        )
        if order.task.demonstrations:
            played = await show(order.task, index, chat)
            verdict = None if played.end.is_error else Verdict(reward=played.transcript.environment_reward)
            group.played_at_s = now()
            return played, verdict
        played = await play_episode(
            self._environments, order.task, chat, self._config, seed=order.seed, gateway=self._gateway
        )
        limits = self._config.env
        limit_s = limits.setup_timeout_s if played.end is EpisodeEnd.SETUP_TIMEOUT else limits.episode_timeout_s
        if played.end.is_error and silence_s > limit_s / 2:
            raise EngineLost(f"an episode waited {silence_s:.0f} s for a token, and failed: {played.detail}")
        if played.end is EpisodeEnd.EPISODE_TIMEOUT and not self._client.is_served:
            raise EngineLost("all rollout engines were lost, and none was back before the episode ran out of time")
        group.played_at_s = now()
        if played.end.is_error:
            return played, None
        start_s = group.played_at_s
        verdict = await self._scorer.score(played.transcript)
        group.scoring.append((start_s, now()))
        return played, verdict

    def _hint_for(self, order: GroupOrder) -> Callable[[Sequence[Message]], list[Message]] | None:
        """None if the teacher reads what the policy reads, or nobody asks one, as in an evaluation."""
        template = self._config.teacher.args.get("prompt") if self._config.teacher.models else None
        if template is None or order.engine is not None:
            return None
        return partial(hinted, task=order.task, template=template)


async def first_ended(plays: Sequence[_Play], order: GroupOrder) -> list[_Scored]:
    """All episodes of a group with spare ones. As soon as enough of them were scored, the others are cancelled."""
    sampled = range(order.num_episodes - order.is_last_greedy)
    wanted = len(sampled) - order.num_spare

    def scored(done: Mapping[int, _Scored]) -> list[int]:
        return [index for index in sampled if index in done and _is_scored(*done[index])]

    def is_enough(done: Mapping[int, _Scored]) -> bool:
        return len(scored(done)) >= wanted and all(index in done for index in range(len(sampled), len(plays)))

    found = await until_enough(plays, is_enough)
    done = {index: episode for index, episode in enumerate(found) if episode is not None}
    for index in scored(done)[wanted:]:  # they ended at the same moment
        del done[index]
    return [done.get(index) or (_cancelled(order.task), None) for index in range(len(plays))]


def _is_scored(played: PlayedEpisode, verdict: Verdict | None) -> bool:
    """Whether an episode can be trained on, as far as is known before the group is scored."""
    if verdict is None:
        return False
    end = verdict.end or (EpisodeEnd.NO_VERDICT if verdict.reward is None else played.end)
    return verdict.awaits_group or not end.is_error


def _cancelled(task: Task) -> PlayedEpisode:
    end = EpisodeEnd.CANCELLED
    transcript = Transcript(task=task, prompt=(), completion=(), environment_reward=None, end=end, num_sampled=0)
    payload = EpisodePayload(samples=[], messages=[])
    return PlayedEpisode(end=end, payload=payload, transcript=transcript, detail="its group was full without it")


def _facts(order: GroupOrder, summaries: Sequence[EpisodeSummary]) -> dict[str, int | str]:
    ends = Counter(summary.end.value for summary in summaries)
    sampled = [summary for summary in summaries if summary.num_loss_tokens]
    return {
        "group": order.group_id,
        "version": max((summary.newest_version for summary in sampled), default=NO_VERSION),
        "oldest_version": min((summary.oldest_version for summary in sampled), default=NO_VERSION),
        "tokens": sum(summary.num_completion_tokens for summary in summaries),
        "outcome": ", ".join(f"{count} {end}" for end, count in ends.most_common()),
    }


def _reward_spans(group: _UnderWay) -> list[Span]:
    """The times during which something was being scored."""
    spans: list[Span] = []
    for start_s, end_s in sorted(group.scoring):
        if spans and start_s <= spans[-1].end_s:
            start_s, end_s = spans[-1].start_s, max(spans.pop().end_s, end_s)
        facts: dict[str, int | str] = {"group": group.order.group_id}
        spans.append(Span(actor=ACTOR, name="reward", start_s=start_s, end_s=end_s, facts=facts))
    return spans


def _in_object_store(file: bytes) -> object:
    import ray

    return ray.put(file)


def _calls_through_ray() -> RemoteCalls:
    import ray
    from ray.exceptions import OutOfMemoryError, RayActorError

    return RemoteCalls(
        cancel=lambda call: ray.cancel(cast(ray.ObjectRef, call)),
        is_lost=lambda error: isinstance(error, RayActorError | OutOfMemoryError | EngineLost),
    )
