"""Evaluation: fixed tasks, played beside training on one engine that keeps one version, or by a fleet without training.

    pin an engine -> play every task, as for training -> scores -> unpin

Rules: every token of an evaluation is of one version. The seeds never change. An evaluation that is lost is reported as
lost, and the run goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.config import Config
from rlflow.errors import RunError
from rlflow.groups.scores import Score, scores_of
from rlflow.roles import Workers
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.deadlines import within
from rlflow.types import GroupOrder, PlayedGroup, Span, Task

AT_ONCE = 64
"""Tasks played at the same time on each engine; it queues what it cannot run."""

Keep = Callable[[Task, PlayedGroup], Awaitable[None]]
"""Told the episodes of each task as soon as they have ended, in any order."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    """Steps done when it began."""
    version: int
    """The trainer's version when it began; every token is of this version."""
    scores: list[Score]
    """First that of all sampled episodes."""
    spans: list[Span] = field(default_factory=list)
    detail: str = ""
    """Why there is no reward."""

    @property
    def reward(self) -> float | None:
        """Mean over the sampled episodes with a verdict; None when there is none, and then `detail` says why."""
        return self.scores[0].reward

    @property
    def num_episodes(self) -> int:
        return self.scores[0].num_episodes

    @property
    def num_failed(self) -> int:
        return self.scores[0].num_failed

    def record(self) -> dict[str, float | int | None]:
        """A line of evaluations.jsonl."""
        figures = (score.record() for score in self.scores)
        return {"step": self.step, "version": self.version} | {k: v for each in figures for k, v in each.items()}


@dataclass(slots=True)
class HeldOut:
    """The rewards of a run's evaluations so far, by the step after which each began."""

    rewards: dict[int, float | None] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The first of the steps with the highest reward. The model before the first step is where `model.path` says,
        so that it is not asked for here."""
        found = {step: reward for step, reward in self.rewards.items() if step and reward is not None}
        return max(found, key=found.__getitem__, default=None)

    def __str__(self) -> str:
        known = [reward for reward in self.rewards.values() if reward is not None]
        if not known:
            return ""
        best = self.best
        at_best = "" if best is None else f" (best {self.rewards[best]:.3f} at step {best})"
        return f"held-out {known[0]:.3f} -> {known[-1]:.3f}{at_best}"

    @classmethod
    def of(cls, records: Sequence[Mapping[str, float | int | None]]) -> "HeldOut":
        """From the lines of evaluations.jsonl."""
        return cls({int(record["step"] or 0): record["eval/reward"] for record in records})


async def evaluate(
    config: Config,
    workers: Workers,
    tasks: Sequence[Task],
    *,
    step: int,
    version: int,
    engine: int | None = None,
    plays_greedy: bool = False,
    keep: Keep | None = None,
) -> Evaluation:
    """Play every task `eval.episodes` times, and once more taking the likeliest tokens if `plays_greedy`.

    `engine` is pinned at `version`, and unpinned at the end; None plays on all engines. If the engine or a runner is
    lost, that is the result: no reward, and a `detail`.
    """
    places = asyncio.Semaphore(AT_ONCE * (config.rollout.engines if engine is None else 1))

    async def play(index: int, task: Task) -> PlayedGroup:
        order = GroupOrder(
            group_id=-1 - index,  # the ledger has no such group
            task=task,
            num_episodes=config.eval.episodes + plays_greedy,
            seed=index,
            is_last_greedy=plays_greedy,
            engine=engine,
        )
        async with places:
            stage = f"evaluating task {task.id}"
            played = await within(stage, config.deadlines.group_s, workers.runners.play(order))
            if keep is not None:
                await keep(task, played)
            played.payloads, played.pictures = [], None  # so that the object store need not hold them to the end
            return played

    try:
        try:
            played = await all_or_none([play(index, task) for index, task in enumerate(tasks)])
        finally:
            if engine is not None:
                giving_back = workers.engines.unpin(engine)
                await within("giving the evaluation's engine back", workers.engines.patience_s, giving_back)
    except RunError as error:
        lost = Score(num_tasks=len(tasks), num_failed=len(tasks) * config.eval.episodes)
        return Evaluation(step=step, version=version, scores=[lost], detail=str(error))
    episodes = [episode for group in played for episode in group.episodes]
    versions = {v for e in episodes if e.is_trainable for v in (e.oldest_version, e.newest_version)}
    assert versions <= {version}, f"engines at version {version} sampled under {sorted(versions)}"
    cut = config.eval.episodes
    scores = scores_of(tasks, [group.episodes[:cut] for group in played], is_greedy=False)
    if plays_greedy:
        scores += scores_of(tasks, [group.episodes[cut:] for group in played], is_greedy=True)
    why = f"no episode has a verdict; the first ended as {episodes[0].end}: {episodes[0].detail}"
    return Evaluation(
        step=step,
        version=version,
        scores=scores,
        spans=[span for group in played for span in group.spans],
        detail="" if scores[0].num_episodes else why,
    )
