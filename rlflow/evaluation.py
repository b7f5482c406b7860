"""Evaluation beside training: fixed tasks, played on one engine that keeps one version while the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.concurrency import all_or_none
from rlflow.config import Config
from rlflow.deadlines import within
from rlflow.errors import RunError
from rlflow.roles import Workers
from rlflow.types import GroupOrder, PlayedGroup, Span, Task

AT_ONCE = 64
"""Tasks played at the same time; the engine queues what it cannot run."""
ATTEMPTS = 2
"""An engine that is lost takes its evaluation along; it is begun again on another one."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    """Steps done when it began."""
    version: int
    """Of every token."""
    reward: float
    """Mean over the episodes with a verdict."""
    num_episodes: int
    num_failed: int
    """Episodes without a verdict; they are not in `reward`."""
    spans: list[Span]


async def evaluate(config: Config, workers: Workers, tasks: Sequence[Task], step: int) -> Evaluation:
    """Play every task `eval.episodes` times, with the same seeds at every call.

    Raises RunError when no episode has a verdict, or when the engine or the runner is lost twice.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            played = await _play_pinned(config, workers, tasks)
        except RunError:
            if attempt == ATTEMPTS:
                raise
        else:
            return _summarize(played, step)
    raise AssertionError("the last attempt returns or raises")


async def _play_pinned(config: Config, workers: Workers, tasks: Sequence[Task]) -> list[PlayedGroup]:
    deadlines = config.deadlines
    engine = await within("setting an engine aside for the evaluation", deadlines.group_s, workers.engines.pin())
    places = asyncio.Semaphore(AT_ONCE)

    async def play(index: int, task: Task) -> PlayedGroup:
        # A negative id is no group of the ledger.
        order = GroupOrder(group_id=-1 - index, task=task, num_episodes=config.eval.episodes, seed=index, engine=engine)
        async with places:
            return await within(f"evaluating task {task.id}", deadlines.group_s, workers.runners.play(order))

    try:
        return await all_or_none([play(index, task) for index, task in enumerate(tasks)])
    finally:
        await within("giving the evaluation's engine back", deadlines.weights_s, workers.engines.unpin(engine))


def _summarize(played: Sequence[PlayedGroup], step: int) -> Evaluation:
    episodes = [episode for group in played for episode in group.episodes]
    judged = [episode for episode in episodes if episode.is_trainable]
    if not judged:
        first = episodes[0]
        raise RunError(f"no episode of the evaluation has a verdict; the first ended as {first.end}: {first.detail}")
    versions = {version for episode in judged for version in (episode.oldest_version, episode.newest_version)}
    assert len(versions) == 1, f"the pinned engine sampled under versions {sorted(versions)}"
    return Evaluation(
        step=step,
        version=versions.pop(),
        reward=sum(episode.reward or 0.0 for episode in judged) / len(judged),
        num_episodes=len(judged),
        num_failed=len(episodes) - len(judged),
        spans=[span for group in played for span in group.spans],
    )
