"""From the sampler to the trainer: each live group has an asyncio task that takes it through its life.

    sampler -> admit -> play and score -> grade -> frozen models -> ready queue -> take
                           |                |                           |
                           +-> failed,      +-> no verdict,             +-> stale: too old for the update, or played
                               slow             filtered                       too long; failed: its machine was lost

Rules:
- Every admitted group leaves through `take` or through `_drop`, exactly once.
- No more groups start than `staleness.admission_budget` allows, and none while the ready ones hold too many bytes.
- A group that is too old for the update is dropped here at the latest, by the rules of `staleness`.
- With `rollout.oversample` more groups start than a step takes. When a synchronous step is full, the others end as
  slow; `rounds.py` says when their tasks are played again.
- A task whose group failed, or came too late, is played again. Many failures in a row end the run; any error but a lost
  group ends it at once, as does a frozen model that hangs.

The main loop of `driver.py` calls `admit` when there may be room and `take` when it can train. It meets the groups'
tasks in the ledger, in the ready queue and in one event.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlflow.config import Config, Order
from rlflow.errors import VITAL_LOST, DeadlineError, EngineLost, PayloadLost, RunError, StaleGroup, WorkerLost
from rlflow.groups import staleness
from rlflow.groups.grading import Grader, why_no_verdict
from rlflow.groups.ledger import DropReason, GroupState, Ledger
from rlflow.groups.ready import ReadyQueue
from rlflow.groups.rounds import Rounds, num_spare
from rlflow.groups.sampler import TaskSampler
from rlflow.roles import Workers
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.deadlines import or_hung, within
from rlflow.runtime.derived import frozen_models
from rlflow.types import EpisodeSummary, GroupOrder, ReadyGroup, Span, Task

MAX_TASK_FAILURES = 3
"""Groups of one task that may fail in one pass before the task is given up."""
MAX_FILTERED_STEPS = 10
"""Steps' worth of groups in a row that dynamic sampling may throw away, as in DAPO (arXiv:2503.14476)."""
HEARTBEAT_S = 60.0
"""Seconds without a group to train on after which people are told why, and told again."""


@dataclass(slots=True)
class Progress:
    """How far the run is. The driver, the publisher and the saver write it; the intake reads it."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """The trainer's version: steps of which an update was applied."""
    served_step: int = 0
    """Steps that were done when the engines' version was made."""
    served_version: int = 0
    """The version that every engine has reached: the oldest whose tokens a new group can hold."""
    stop_requested: bool = False


@dataclass(slots=True)
class Collected:
    """What has been gathered since the last report."""

    episodes: list[EpisodeSummary] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def take(self) -> "Collected":
        """Return everything and start empty."""
        taken = Collected(episodes=self.episodes, spans=self.spans)
        self.episodes, self.spans = [], []
        return taken


class PhaseListener(Protocol):
    """Told what the run is at."""

    def phase(self, name: str) -> None: ...


class Listener(Protocol):
    """Told what happens to groups."""

    def dropped(self, group_id: int, reason: DropReason, detail: str) -> None: ...

    def waiting(self, reason: str) -> None:
        """No group could be trained for another HEARTBEAT_S; `reason` says why."""
        ...


class Intake:
    """Every group from its admission until the trainer takes it or it is dropped."""

    def __init__(
        self,
        *,
        config: Config,
        workers: Workers,
        sampler: TaskSampler,
        ledger: Ledger,
        listener: Listener,
        progress: Progress,
    ) -> None:
        self.sampler = sampler
        self.grader = Grader(config)
        self.collected = Collected()
        self.ready = ReadyQueue(
            order=config.staleness.order,
            max_versions=config.staleness.max_versions,
            groups_per_step=config.algorithm.groups_per_step,
        )
        self._config = config
        self._workers = workers
        self._ledger = ledger
        self._listener = listener
        self._progress = progress
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._rounds = Rounds(config)
        self._target = min(2, 1 + config.staleness.max_versions) * config.algorithm.groups_per_step
        self._waited_s = 0.0
        self._crowded_shares: list[float] = []
        """One for each group that was played in this step."""
        self._lost_in_a_row = 0
        self._last_loss = ""
        self._newest_lost = 0
        """The newest group at the last loss that counted; the loss of an older group may be part of that loss."""
        self._filtered_in_a_row = 0
        self._failure: BaseException | None = None
        self._closing = False

    def admit(self) -> None:
        """Start as many groups as the staleness bound and the ready queue allow. An error, such as one of a user's
        curriculum, is raised by the main task, because the caller may be a group's."""
        if self._ledger.failure is not None:
            self.fail(self._ledger.failure)
        if self._closing or self._failure is not None:
            return
        try:
            self._rounds.begin(self._progress.served_step, self.sampler)
            while self._budget():
                self._admit_one()
        except Exception as error:
            self.fail(error)

    def _admit_one(self) -> None:
        task, task_pass = self.sampler.next()
        version = self._progress.served_version
        group_id = self._ledger.admit(task.id, task_pass=task_pass, version=version)
        was_late = task_pass is not None and self._was_late(task.id, task_pass)
        self.ready.expect(group_id, version, was_late=was_late)
        living = asyncio.create_task(self._live(group_id, task), name=f"group {group_id}")
        self._tasks[group_id] = living
        # Not in `_live`, because a task that is cancelled before its first step runs nothing.
        living.add_done_callback(lambda _: self._tasks.pop(group_id))

    async def take(self, places: int) -> list[ReadyGroup]:
        """Groups for the update in hand, at least one and at most `places`, none of them too late.

        Raises what made the run fail, and DeadlineError when no group can be trained for longer than groups live.
        """
        # Every live group ends within its own deadline, so a longer wait is a fault of this loop.
        limit_s = left_s = self._config.deadlines.group_s + self._config.deadlines.train_s
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            self.raise_failure()
            ready = self.ready.take(version=self._progress.version, places=places)
            taken = [group for group in ready if not (self._drop_if_late(group) or self._drop_if_lost(group))]
            for group in taken:
                self._ledger.advance(group.group_id, GroupState.TRAINING)
            if self._rounds.ends_slow and len(taken) == places:
                self._end_the_slow()
            self.admit()
            if taken:
                return taken
            started_s = loop.time()
            try:
                await within("waiting for a group to train on", min(HEARTBEAT_S, left_s), self._changed.wait())
            except DeadlineError:
                self._listener.waiting(self.why_nothing_is_ready())
            waited_s = loop.time() - started_s
            self._waited_s += waited_s
            left_s -= waited_s
            if left_s <= 0:
                raise DeadlineError("waiting for a group to train on", limit_s, self._last_loss)

    def _end_the_slow(self) -> None:
        """The step is full: no update will use the other groups."""
        self.ready.remove(lambda _: True)
        for group_id in self._ledger.live(GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORED, GroupState.READY):
            self._drop(group_id, DropReason.SLOW, "the step was full without it")
            if group_id in self._tasks:
                self._tasks[group_id].cancel()

    def end_step(self, step_s: float) -> None:
        """A step of so many seconds is over: let more groups live, or fewer, in the next one."""
        self._target = staleness.next_target(
            self._target,
            waited_share=self._waited_s / max(step_s, 1e-9),
            num_ready=len(self.ready),
            crowded_share=sum(self._crowded_shares) / max(1, len(self._crowded_shares)),
            groups_per_step=self._config.algorithm.groups_per_step,
            max_versions=self._config.staleness.max_versions,
        )
        self._waited_s = 0.0
        self._crowded_shares.clear()

    def drop_late(self) -> None:
        """Drop the ready groups that are too old for the next update. To be called when the version has changed."""
        self.ready.remove(self._drop_if_late)

    def drop_lost(self) -> None:
        """Drop the ready groups that have lost a payload with its machine."""
        self.ready.remove(self._drop_if_lost)

    def fail(self, error: BaseException) -> None:
        """Make `take` raise this."""
        self._failure = self._failure or error
        self._changed.set()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Cancel the groups under way, and admit no more."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cancel_unfinished(self, *, keep_ready: bool) -> None:
        """After `close`: end the groups that no step of this process will use."""
        kept = {group.group_id for group in self.ready.groups} if keep_ready else set()
        self.ready.remove(lambda group: group.group_id not in kept)
        for group_id in self._ledger.live():
            if group_id not in kept:
                self._drop(group_id, DropReason.CANCELLED, "the run ended")

    async def restore(self, groups: Sequence[ReadyGroup]) -> None:
        """Take up the ready groups of a checkpoint; the tasks of other live groups are played again."""
        kept = {group.group_id for group in groups}
        for group in groups:
            await self._ask_frozen_models(group)
            task_id, task_pass = self._ledger.task_of(group.group_id)
            self.ready.expect(group.group_id, group.oldest_version, was_late=self._was_late(task_id, task_pass))
            self.ready.put(group)
        for group_id in self._ledger.live():
            if group_id not in kept:
                self._drop(group_id, DropReason.CANCELLED, "was under way when the run stopped")

    def why_nothing_is_ready(self) -> str:
        """In one line: where the groups are, and what keeps more of them from starting."""
        counts = self._ledger.counts()
        live = [GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING]
        where = ", ".join(f"{counts[state]} {state}" for state in live if counts[state]) or "no group is live"
        running = self._ledger.live(GroupState.RUNNING)
        oldest = f"; the oldest under way is group {running[0]}" if running else ""
        return f"{where}{oldest}; {self._why_none_starts()}"

    def _why_none_starts(self) -> str:
        if self._closing:
            return "no group starts, because the run is ending"
        if self._is_full:
            return f"no group starts, because those that are ready hold {self.ready.num_bytes >> 20} MB"
        if not self._allowed():
            bound = self._config.staleness.max_versions
            return (
                f"no group starts, because the engines have version {self._progress.served_version}, step "
                f"{self._progress.step + 1} is not done and staleness.max_versions is {bound}"
            )
        if not self._budget():
            enough = self._target + self._rounds.most_spare
            return f"no group starts, because {enough} live ones have kept the trainer busy so far"
        return "more may start"

    # -- the life of one group

    async def _live(self, group_id: int, task: Task) -> None:
        """Never raises: anything but a lost group stops the run."""
        try:
            await self._play_unless_lost(group_id, task)
        except Exception as error:
            # The main task raises it again; nobody awaits this one.
            self.fail(error)
        finally:
            self.admit()
            self._changed.set()

    async def _play_unless_lost(self, group_id: int, task: Task) -> None:
        try:
            await self._play(group_id, task)
        except VITAL_LOST:
            raise
        except StaleGroup as error:
            self._drop(group_id, DropReason.STALE, str(error))
        except (WorkerLost, PayloadLost, EngineLost, DeadlineError) as error:
            # All groups that one process takes with it are one failure; groups admitted later are not among them.
            is_first = group_id > self._newest_lost
            self._newest_lost = max(self._tasks) if is_first else self._newest_lost
            self._lose(group_id, DropReason.FAILED, str(error), counts=is_first)
        except RunError as error:
            self._lose(group_id, DropReason.FAILED, str(error))

    async def _play(self, group_id: int, task: Task) -> None:
        self._ledger.advance(group_id, GroupState.RUNNING)
        size = self._config.algorithm.group_size
        spare = num_spare(size, self._config.rollout.oversample_episodes)
        order = GroupOrder(
            group_id=group_id,
            task=task,
            num_episodes=size + spare + self.grader.needs_greedy,
            num_spare=spare,
            is_last_greedy=self.grader.needs_greedy,
            seed=group_seed(self._config.run.seed, group_id),
        )
        played = await within(
            f"playing group {group_id} (task {task.id})",
            self._config.deadlines.group_s,
            self._workers.runners.play(order),
            "raise deadlines.group_s if episodes take this long",
        )
        self._ledger.advance(group_id, GroupState.SCORED)
        self._crowded_shares.append(played.crowded_share)
        self.collected.episodes += played.episodes
        self.collected.spans += played.spans
        sampled = played.episodes[: size + spare]  # a greedy one comes after them
        rewards = [episode.reward for episode in sampled if episode.is_trainable and episode.reward is not None]
        self.sampler.on_result(task.id, rewards)
        ready = self.grader.ready(task, played)
        if ready is None:
            self._lose(group_id, DropReason.NO_VERDICT, why_no_verdict(played.episodes))
            return
        if self.grader.is_filtered(ready):
            self._drop(group_id, DropReason.FILTERED, "nothing in it to compare")
            self._lost_in_a_row = 0
            self._filtered_in_a_row += 1
            limit = MAX_FILTERED_STEPS * self._config.algorithm.groups_per_step
            if self._filtered_in_a_row >= limit:
                self.fail(
                    RunError(
                        f"{limit} groups in a row held nothing to compare: all rewards of a group were equal, or all "
                        "its episodes were cut off; take easier or harder tasks, raise rollout.max_new_tokens, or set "
                        "algorithm.dynamic_sampling=false"
                    )
                )
            return
        await self._ask_frozen_models(ready)
        self._ledger.advance(group_id, GroupState.READY)
        self.ready.put(ready)
        self._lost_in_a_row = self._filtered_in_a_row = 0

    async def _ask_frozen_models(self, group: ReadyGroup) -> None:
        """Give the group what the reference and its teacher say of it, as far as the run has them."""

        async def ask(name: str) -> list[object]:
            computing = self._workers.frozen[name].logprobs(group.payloads)
            return await or_hung(f"the {name}'s log-probabilities", self._config.deadlines, "train_s", computing)

        asked = frozen_models(self._config, group.task_kind)
        found = await all_or_none([ask(name) for name in asked.values()])
        group.frozen = dict(zip(asked, found, strict=True))

    def _drop_if_late(self, group: ReadyGroup) -> bool:
        """The gate at consumption: what admission, order and cancelling have missed ends here."""
        is_late = staleness.is_too_late(group, oldest=self.oldest_allowed, late=self._config.staleness.late)
        if is_late:
            detail = f"tokens of version {group.oldest_version}, update of version {self._progress.version}"
            self._drop(group.group_id, DropReason.STALE, detail)
        return is_late

    def _drop_if_lost(self, group: ReadyGroup) -> bool:
        if is_lost := self._workers.runners.is_lost(group.stored):
            self._drop(group.group_id, DropReason.FAILED, "its episodes were stored on a machine that is lost")
        return is_lost

    def _lose(self, group_id: int, reason: DropReason, detail: str, *, counts: bool = True) -> None:
        """Drop a group that gave nothing. Many in a row mean that something is broken, and end the run."""
        self._drop(group_id, reason, detail)
        self._lost_in_a_row += counts
        self._last_loss = f"the last one was dropped as {reason}: {detail}"
        limit = max(16, 2 * self._config.algorithm.groups_per_step)
        if self._lost_in_a_row >= limit:
            self.fail(RunError(f"{limit} groups in a row gave nothing to train on; {self._last_loss}"))

    def _drop(self, group_id: int, reason: DropReason, detail: str) -> None:
        self.ready.forget(group_id)
        task_id, task_pass = self._ledger.task_of(group_id)
        self._ledger.drop(group_id, reason, detail)
        self._listener.dropped(group_id, reason, detail)
        if not reason.puts_task_back:
            return
        if reason is DropReason.SLOW:
            self.sampler.defer(task_id, task_pass)
            return
        failed = reason is DropReason.FAILED
        if failed and self._ledger.num_drops_of(task_id, task_pass, reason) >= MAX_TASK_FAILURES:
            return
        self.sampler.put_back(task_id, task_pass)

    # -- what the rules need to know

    def _budget(self) -> int:
        """How many groups to start now."""
        if self._is_full:
            return 0
        return min(self._allowed(), max(0, self._target + self._rounds.most_spare - self._ledger.num_live))

    def _allowed(self) -> int:
        """How many groups the staleness bound lets start."""
        progress = self._progress
        return staleness.admission_budget(
            served_step=progress.served_step,
            num_steps=progress.step + 1 if progress.stop_requested else self._config.run.steps,
            groups_per_step=self._config.algorithm.groups_per_step,
            max_versions=self._config.staleness.max_versions,
            num_trained=self._ledger.num_trained,
            num_live=self._ledger.num_live,
            num_training=self._ledger.num_training,
            num_spare=self._rounds.spare_now(self.sampler),
        )

    @property
    def _is_full(self) -> bool:
        return self.ready.num_bytes > self._config.staleness.max_ready_mb * 2**20

    @property
    def oldest_allowed(self) -> int:
        """The oldest version whose tokens the next update may use."""
        return staleness.oldest_allowed(
            version=self._progress.version, max_versions=self._config.staleness.max_versions
        )

    def _was_late(self, task_id: str, task_pass: int) -> bool:
        """Whether the task was dropped as stale before in this pass; asked only if that gives it a claim."""
        return (
            self._config.staleness.order is Order.ready_first
            and self._ledger.num_drops_of(task_id, task_pass, DropReason.STALE) > 0
        )


def group_seed(run_seed: int, group_id: int) -> int:
    """The sampling seed of a group: different for every group of a run and for every run seed; 31 bits."""
    return (run_seed * 7_368_787 + group_id * 104_729) % 2**31
