"""Evaluation beside training: fixed tasks, played on one engine that keeps one version while the others go on.

    pin an engine -> play every task, as for training -> the mean reward -> unpin

Rules: every token of an evaluation is of one version. The seeds never change. An evaluation that is lost is reported as
lost, and the run goes on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlflow.config import Config
from rlflow.errors import RunError
from rlflow.roles import Workers
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.deadlines import within
from rlflow.types import GroupOrder, PlayedGroup, Span, Task

AT_ONCE = 64
"""Tasks played at the same time; the engine queues what it cannot run."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    """Steps done when it began."""
    version: int
    """The trainer's version when it began; every token is of this version."""
    reward: float | None = None
    """Mean over the episodes with a verdict; None when there is none, and then `detail` says why."""
    num_episodes: int = 0
    """Episodes with a verdict."""
    num_failed: int
    """Episodes without a verdict; they are not in `reward`."""
    spans: list[Span] = field(default_factory=list)
    detail: str = ""


async def evaluate(
    config: Config, workers: Workers, tasks: Sequence[Task], *, engine: int, step: int, version: int
) -> Evaluation:
    """Play every task `eval.episodes` times on `engine`, which is pinned at `version`, and unpin it.

    If the engine or a runner is lost, that is the result: no reward, and a `detail`.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def play(index: int, task: Task) -> PlayedGroup:
        # A negative id: the ledger has no such group.
        order = GroupOrder(group_id=-1 - index, task=task, num_episodes=config.eval.episodes, seed=index, engine=engine)
        async with places:
            return await within(f"evaluating task {task.id}", config.deadlines.group_s, workers.runners.play(order))

    try:
        try:
            played = await all_or_none([play(index, task) for index, task in enumerate(tasks)])
        finally:
            giving_back = workers.engines.unpin(engine)
            await within("giving the evaluation's engine back", workers.engines.patience_s, giving_back)
    except RunError as error:
        num_failed = len(tasks) * config.eval.episodes
        return Evaluation(step=step, version=version, num_failed=num_failed, detail=str(error))
    episodes = [episode for group in played for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.is_trainable and episode.reward is not None]
    versions = {v for e in episodes if e.is_trainable for v in (e.oldest_version, e.newest_version)}
    assert versions <= {version}, f"an engine pinned at version {version} sampled under {sorted(versions)}"
    first = episodes[0]
    return Evaluation(
        step=step,
        version=version,
        reward=sum(rewards) / len(rewards) if rewards else None,
        num_episodes=len(rewards),
        num_failed=len(episodes) - len(rewards),
        spans=[span for group in played for span in group.spans],
        detail="" if rewards else f"no episode has a verdict; the first ended as {first.end}: {first.detail}",
    )
