"""THE training loop. It steers workers through the Protocols of `roles.py` and holds metadata only.

    sampler -> admit -> play and score -> judge -> ready -> accumulate -> step -> publish weights -> admit ...

Two things happen at once: each live group has an asyncio task that takes it from admission to the ready queue, and the
main task takes ready groups into steps. Both meet in the ledger, in the ready queue and in one event. Synchronous
training is `max_versions` 0 in this same loop: the admission budget then opens only when a step is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlflow import staleness
from rlflow.algorithms.advantage import grpo
from rlflow.checkpoint import CheckpointStore, RunState
from rlflow.config import Config
from rlflow.deadlines import within
from rlflow.disk import disk_errors
from rlflow.errors import RunError
from rlflow.ledger import DropReason, GroupState, Ledger
from rlflow.roles import LoadOutcome, StepOutcome, Workers
from rlflow.sampler import TaskSampler
from rlflow.types import EpisodeSummary, GroupOrder, PayloadRef, PlayedGroup, ReadyGroup, Span, Task

MAX_TASK_FAILURES = 3
"""Groups of one task that may fail in one pass before the task is given up."""
MAX_SKIPPED_UPDATES = 3
"""Updates in a row that may be skipped for a gradient that is not finite."""


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Everything about one step, for whoever tells people about it."""

    step: int
    """Counted from 1."""
    version: int
    """After the update."""
    start_s: float
    end_s: float
    trained_version: int
    """The version that the gradient was taken at."""
    groups: list[ReadyGroup]
    episodes: list[EpisodeSummary]
    """All episodes played since the last report, errors included."""
    payloads: list[tuple[str, EpisodeSummary, PayloadRef]]
    """(task id, summary, handle) of the worst and the best trained episode."""
    outcome: StepOutcome
    loaded: LoadOutcome
    spans: list[Span]
    counts: dict[str, int]
    num_ready: int
    num_zero_std: int
    """Groups of the step whose episodes all had the same reward."""


class Observer(Protocol):
    """Told what happens; must not fail the run for a reason of its own, other than a full disk."""

    def phase(self, name: str) -> None: ...

    def dropped(self, group_id: int, reason: DropReason, detail: str) -> None: ...

    async def step(self, report: StepReport) -> None: ...

    def saved(self, folder: Path) -> None: ...


@dataclass(slots=True)
class _Progress:
    """Counters of the loop."""

    step: int = 0
    version: int = 0
    skipped_in_a_row: int = 0
    lost_in_a_row: int = 0
    """Groups that gave nothing to train on since the last one that did."""


@dataclass(slots=True)
class _Collected:
    """What has been gathered since the last report."""

    episodes: list[EpisodeSummary] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class Driver:
    """One run. `run` returns when all steps are done or `request_stop` was called; then the last state is saved."""

    def __init__(
        self,
        *,
        config: Config,
        workers: Workers,
        sampler: TaskSampler,
        ledger: Ledger,
        checkpoints: CheckpointStore,
        observer: Observer,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._workers = workers
        self._sampler = sampler
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._observer = observer
        self._now = now
        self._progress = _Progress()
        self._collected = _Collected()
        self._ready: list[ReadyGroup] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._stop_requested = False
        self._closing = False
        self._saved_step = -1

    # -- from outside

    async def run(self) -> None:
        try:
            await self._publish()
            self._admit()
            while self._progress.step < self._config.run.steps and not self._stop_requested:
                await self._train_one_step()
                every = self._config.run.checkpoint_every
                if every and self._progress.step % every == 0:
                    await self.save()
            await self._cancel_unfinished()
            await self.save()
        except RunError as error:
            await self._save_after(error)
            raise
        finally:
            await self._end_tasks()

    def request_stop(self) -> None:
        """Finish the step in hand, save, return."""
        self._stop_requested = True

    async def restore(self, folder: Path, state: RunState) -> None:
        """Take up a checkpoint. The ledger passed to the constructor is already the checkpoint's."""
        self._progress.step, self._progress.version = state.step, state.version
        self._saved_step = state.step
        self._sampler.restore(state.sampler)
        await within(
            "loading the checkpoint",
            self._config.deadlines.checkpoint_s,
            self._workers.trainer.load(folder / "trainer"),
        )
        payloads = await self._load_ready_payloads(folder, sum(len(group.episodes) for group in state.ready))
        for group in state.ready:
            group.payloads = [payloads.pop(0) for _ in group.episodes]
            group.references = await self._references(group.payloads)
        self._ready = state.ready
        kept = {group.group_id for group in state.ready}
        for group_id in self._ledger.live():
            if group_id not in kept:
                self._drop(group_id, DropReason.CANCELLED, "was under way when the run stopped")

    async def save(self) -> None:
        """Write a checkpoint of this moment, unless this step has one."""
        if self._saved_step == self._progress.step:
            return
        self._observer.phase("saving")
        deadline = self._config.deadlines.checkpoint_s
        with disk_errors("a checkpoint", self._checkpoints.folder):
            partial = self._checkpoints.begin(self._progress.step)
            await within("saving the trainer", deadline, self._workers.trainer.save(partial / "trainer"))
            ready = list(self._ready)
            payloads = [payload for group in ready for payload in group.payloads]
            if payloads:
                await within(
                    "saving the ready groups",
                    deadline,
                    self._workers.runners.save_payloads(payloads, partial / "ready"),
                )
            self._ledger.backup(partial / "ledger.db")
            state = RunState(
                step=self._progress.step, version=self._progress.version, sampler=self._sampler.state, ready=ready
            )
            folder = self._checkpoints.commit(partial, state)
        self._saved_step = self._progress.step
        self._observer.saved(folder)

    def describe(self) -> str:
        """What every live group is doing, for the message of a run that stalls."""
        counts = ", ".join(f"{name} {count}" for name, count in self._ledger.counts().items() if count)
        ids = ", ".join(str(group_id) for group_id in sorted(self._tasks))
        return (
            f"step {self._progress.step + 1} of {self._config.run.steps}, version {self._progress.version}; groups: "
            f"{counts}; "
            f"under way: {ids or 'none'}; ready: {len(self._ready)}"
        )

    # -- from admission to the ready queue

    def _admit(self) -> None:
        """Start as many groups as the staleness bound and the ready queue allow."""
        if self._closing or self._failure is not None:
            return
        if sum(group.num_bytes for group in self._ready) > self._config.staleness.max_ready_mb * 2**20:
            return
        budget = staleness.admission_budget(
            step=self._progress.step,
            num_steps=self._progress.step + 1 if self._stop_requested else self._config.run.steps,
            groups_per_step=self._config.algorithm.groups_per_step,
            max_versions=self._config.staleness.max_versions,
            num_trained=self._ledger.num_trained,
            num_live=self._ledger.num_live,
        )
        for _ in range(budget):
            task, task_pass = self._sampler.next()
            group_id = self._ledger.admit(task.id, task_pass=task_pass, version=self._progress.version)
            self._tasks[group_id] = asyncio.create_task(self._live(group_id, task), name=f"group {group_id}")

    async def _live(self, group_id: int, task: Task) -> None:
        """The life of one group up to the ready queue. Never raises: what is not a lost group stops the run."""
        try:
            await self._play(group_id, task)
        except RunError as error:
            self._lose(group_id, DropReason.FAILED, str(error))
        except Exception as error:
            # Raised again by the main task, which waits for this group: here nobody would hear it.
            self._failure = error
        finally:
            del self._tasks[group_id]
            self._admit()
            self._changed.set()

    async def _play(self, group_id: int, task: Task) -> None:
        self._ledger.advance(group_id, GroupState.RUNNING)
        order = GroupOrder(
            group_id=group_id,
            task=task,
            num_episodes=self._config.algorithm.group_size,
            seed=group_seed(self._config.run.seed, group_id),
        )
        played = await within(
            f"playing group {group_id} (task {task.id})",
            self._config.deadlines.group_s,
            self._workers.runners.play(order),
            "raise deadlines.group_s if episodes take this long",
        )
        self._ledger.advance(group_id, GroupState.SCORED)
        self._collected.episodes += played.episodes
        self._collected.spans += played.spans
        ready = judge(task.id, played)
        if ready is None:
            self._lose(group_id, DropReason.NO_VERDICT, _why_no_verdict(played.episodes))
            return
        ready.references = await self._references(ready.payloads)
        self._ledger.advance(group_id, GroupState.READY)
        self._ready.append(ready)
        self._progress.lost_in_a_row = 0

    async def _references(self, payloads: Sequence[PayloadRef]) -> list[object] | None:
        if self._workers.reference is None:
            return None
        return await within(
            "the reference log-probabilities",
            self._config.deadlines.train_s,
            self._workers.reference.logprobs(payloads),
        )

    def _lose(self, group_id: int, reason: DropReason, detail: str) -> None:
        """A group that gave nothing; many of them in a row mean that something is broken, and the run stops."""
        self._drop(group_id, reason, detail)
        self._progress.lost_in_a_row += 1
        limit = max(16, 2 * self._config.algorithm.groups_per_step)
        if self._progress.lost_in_a_row >= limit:
            self._failure = RunError(
                f"{limit} groups in a row gave nothing to train on; the last one was dropped as {reason}: {detail}"
            )

    def _drop(self, group_id: int, reason: DropReason, detail: str) -> None:
        self._ledger.drop(group_id, reason, detail)
        self._observer.dropped(group_id, reason, detail)
        if not reason.puts_task_back:
            return
        task_id, task_pass = self._ledger.task_of(group_id)
        if reason is DropReason.FAILED and self._ledger.num_failures(task_id, task_pass) >= MAX_TASK_FAILURES:
            return
        self._sampler.put_back(task_id, task_pass)

    # -- from the ready queue into the weights

    async def _train_one_step(self) -> None:
        start_s, trained_version = self._now(), self._progress.version
        groups: list[ReadyGroup] = []
        while len(groups) < self._config.algorithm.groups_per_step:
            self._observer.phase("waiting for episodes" if not self._ready else "training")
            taken = await self._take(self._config.algorithm.groups_per_step - len(groups))
            self._observer.phase("training")
            spans = await within(
                "accumulating gradients",
                self._config.deadlines.train_s,
                self._workers.trainer.accumulate(taken, None),
                "raise deadlines.train_s if a step takes this long",
            )
            self._collected.spans += spans
            groups += taken
        outcome = await within("the optimiser step", self._config.deadlines.train_s, self._workers.trainer.step())
        self._collected.spans += outcome.spans
        self._count_update(outcome)
        for group in groups:
            self._ledger.advance(group.group_id, GroupState.TRAINED, version=trained_version)
        loaded = await self._publish() if outcome.applied else LoadOutcome(pause_s=0.0)
        self._progress.step += 1
        await self._report(start_s, trained_version, groups, outcome, loaded)
        if not self._stop_requested:
            self._admit()

    def _count_update(self, outcome: StepOutcome) -> None:
        if outcome.applied:
            self._progress.version += 1
            self._progress.skipped_in_a_row = 0
            return
        self._progress.skipped_in_a_row += 1
        if self._progress.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise RunError(
                f"the gradient was not finite {MAX_SKIPPED_UPDATES} times in a row (last norm {outcome.grad_norm}); "
                "lower trainer.learning_rate, or resume from an earlier checkpoint"
            )

    async def _take(self, count: int) -> list[ReadyGroup]:
        """Up to `count` ready groups, at least one, none of them too old."""
        while True:
            if self._failure is not None:
                raise self._failure
            fresh = [group for group in staleness.take_order(self._ready) if not self._drop_if_stale(group)]
            taken, self._ready = fresh[:count], fresh[count:]
            if taken:
                for group in taken:
                    self._ledger.advance(group.group_id, GroupState.TRAINING)
                return taken
            self._admit()
            self._changed.clear()
            await within(
                "waiting for a group to train on",
                # Every live group ends within its own deadline, so that a longer wait is a fault of this loop.
                self._config.deadlines.group_s + self._config.deadlines.train_s,
                self._changed.wait(),
            )

    def _drop_if_stale(self, group: ReadyGroup) -> bool:
        stale = staleness.is_stale(
            oldest_version=group.oldest_version,
            version=self._progress.version,
            max_versions=self._config.staleness.max_versions,
        )
        if stale:
            detail = f"oldest token of version {group.oldest_version}, update of version {self._progress.version}"
            self._drop(group.group_id, DropReason.STALE, detail)
        return stale

    async def _publish(self) -> LoadOutcome:
        """Put the trainer's weights into the engines as the current version."""
        self._observer.phase("weights")
        deadline = self._config.deadlines.weights_s
        staged = await within(
            "staging the weights", deadline, self._workers.trainer.stage_weights(self._progress.version)
        )
        loaded = await within(
            "loading the weights into the engines", deadline, self._workers.engines.load_weights(staged)
        )
        self._collected.spans += [*staged.spans, *loaded.spans]
        return loaded

    async def _report(
        self, start_s: float, trained_version: int, groups: list[ReadyGroup], outcome: StepOutcome, loaded: LoadOutcome
    ) -> None:
        collected, self._collected = self._collected, _Collected()
        await self._observer.step(
            StepReport(
                step=self._progress.step,
                version=self._progress.version,
                start_s=start_s,
                end_s=self._now(),
                trained_version=trained_version,
                groups=groups,
                episodes=collected.episodes,
                payloads=_worst_and_best(groups),
                outcome=outcome,
                loaded=loaded,
                spans=collected.spans,
                counts=self._ledger.counts(),
                num_ready=len(self._ready),
                num_zero_std=sum(_has_equal_rewards(group) for group in groups),
            )
        )

    # -- the end

    async def _cancel_unfinished(self) -> None:
        """End the groups that no step will use; with a later resume in mind, ready groups stay."""
        await self._end_tasks()
        waiting = {group.group_id for group in self._ready} if self._progress.step < self._config.run.steps else set()
        self._ready = [group for group in self._ready if group.group_id in waiting]
        for group_id in self._ledger.live():
            if group_id not in waiting:
                self._drop(group_id, DropReason.CANCELLED, "the run ended")

    async def _save_after(self, error: RunError) -> None:
        """Keep the steps since the last checkpoint, if the trainer still answers; the groups in hand are played
        again."""
        try:
            await self._cancel_unfinished()
            await self.save()
        except RunError as second:
            error.add_note(f"the steps since the last checkpoint could not be saved: {second}")

    async def _end_tasks(self) -> None:
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_ready_payloads(self, folder: Path, count: int) -> list[PayloadRef]:
        if not count:
            return []
        load = self._workers.runners.load_payloads(folder / "ready", count)
        return await within("loading the ready groups", self._config.deadlines.checkpoint_s, load)


def group_seed(run_seed: int, group_id: int) -> int:
    """The sampling seed of a group: different for every group of a run and for every run seed; 31 bits."""
    return (run_seed * 7_368_787 + group_id * 104_729) % 2**31


def judge(task_id: str, played: PlayedGroup) -> ReadyGroup | None:
    """The trainable part of a group with its advantages; None when fewer than two episodes have a verdict.

    An episode that failed is left out of the group's statistics, as if it had not been played.
    """
    kept = [
        (summary, payload)
        for summary, payload in zip(played.episodes, played.payloads, strict=True)
        if summary.is_trainable
    ]
    if len(kept) < 2:
        return None
    rewards = [summary.reward for summary, _ in kept if summary.reward is not None]
    return ReadyGroup(
        group_id=played.group_id,
        task_id=task_id,
        episodes=[summary for summary, _ in kept],
        payloads=[payload for _, payload in kept],
        advantages=grpo.advantages(rewards),
        references=None,
        num_bytes=played.num_bytes,
    )


def _why_no_verdict(episodes: Sequence[EpisodeSummary]) -> str:
    failed = [episode for episode in episodes if not episode.is_trainable]
    first = f": {failed[0].detail}" if failed and failed[0].detail else ""
    ends = ", ".join(sorted({episode.end.value for episode in failed}))
    return f"{len(failed)} of {len(episodes)} episodes have no verdict ({ends}){first}"


def _has_equal_rewards(group: ReadyGroup) -> bool:
    return len({episode.reward for episode in group.episodes}) == 1


def _worst_and_best(groups: Sequence[ReadyGroup]) -> list[tuple[str, EpisodeSummary, PayloadRef]]:
    episodes = [
        (group.task_id, summary, payload)
        for group in groups
        for summary, payload in zip(group.episodes, group.payloads, strict=True)
    ]
    ranked = sorted(episodes, key=lambda item: item[1].reward or 0.0)
    return [ranked[0], ranked[-1]]
