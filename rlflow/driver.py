"""THE training loop. It steers workers through the Protocols of `roles.py`.

    TaskSampler --task--> admit <-------------------------------------------+   groups/intake.py:
       ^                    |  a GroupOrder, within the staleness bound     |   one asyncio task for each live group
       |                    v                                               |
       |        Runners.play: engines sample, environments reply, rewards score -> PlayedGroup
       |                    |                                               |
       +-- put back ---- Grader: who counts, which advantage -> ReadyGroup  |
                            |                                               |
                 FrozenModel.logprobs: the reference and a teacher          |
                            v                                               |
                       ReadyQueue                                           |
                            | take                                          |
                            v                                               |   here: the main task
       Trainer.accumulate -> Trainer.step: version + 1                      |   groups/updates.py: the updates of a step
                            |                                               |
                            +--> Trainer.stage_weights -> Engines.load -----+   publisher.py: beside the next step
                            +--> Trainer.snapshot -> checkpoint                 saver.py: beside the next steps

Rules (numbers as in docs/architecture.md, "What always holds"):
 1. Every admitted group ends exactly once: trained, or dropped with a reason. The ledger counts them.
 2. An update of version v uses no token older than version v - staleness.max_versions, by its cache too, unless
    staleness.late=train asks for it.
 3. Synchronous training is max_versions 0 in this same loop: no group is admitted before the engines have the version.
 9. Every wait has a name and a deadline.
10. The driver holds metadata only; payloads are handles, and it never opens one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlflow.config import Config, Placement
from rlflow.errors import DeadlineError, WorkerError, WorkerLost, first_error_stands
from rlflow.groups.evaluation import Evaluation, HeldOut, evaluate
from rlflow.groups.intake import Intake, Listener, Progress
from rlflow.groups.ledger import GroupState, Ledger
from rlflow.groups.sampler import TaskSampler
from rlflow.groups.updates import Updates, wake_trainer
from rlflow.publisher import Publisher
from rlflow.roles import StepOutcome, Workers
from rlflow.rundir.store import CheckpointStore, RunState
from rlflow.runtime import clock
from rlflow.runtime.deadlines import or_hung, within
from rlflow.saver import SaveListener, Saver
from rlflow.settings.stop_when import StopRule
from rlflow.types import NO_VERSION, EpisodeSummary, PayloadRef, ReadyGroup, Span, Task

ANSWER_S = 120.0
"""Seconds for a trainer to copy its state after a call to one of its ranks has failed. The other ranks may wait for
that rank in a collective, up to a deadline that costs more than the steps since the last checkpoint."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainedEpisode:
    """One episode of a step, for people to look at."""

    task: Task
    summary: EpisodeSummary
    advantages: list[float] | None
    """One value, or one for each turn; None if it was kept out of the gradient, or a critic gave each token its own."""
    payload: PayloadRef


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Everything about one step, for the observer."""

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
    shown: tuple[TrainedEpisode, TrainedEpisode]
    """The worst and the best."""
    outcome: StepOutcome
    pause_s: float
    """The longest pause of an engine for new weights, among the loads that ended since the last report."""
    spans: list[Span]
    counts: dict[str, int]
    num_ready: int
    curriculum: dict[str, float]
    """The curriculum's own metrics, by their names in the record."""
    num_zero_std: int
    """Groups of the step whose episodes all had the same reward."""


class Observer(Listener, SaveListener, Protocol):
    """Told what happens; `step` returns the step's metrics."""

    async def step(self, report: StepReport) -> Mapping[str, float | int | None]: ...

    def evaluated(self, evaluation: Evaluation) -> None: ...


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
        evaluation_tasks: Sequence[Task] = (),
        held_out: HeldOut | None = None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        """`held_out` are the evaluations before a resume; this run's are added."""
        self.ended_early = ""  # or what met run.stop_when
        self._config = config
        self._workers = workers
        self._ledger = ledger
        self._observer = observer
        self._evaluation_tasks = evaluation_tasks
        self._held_out = HeldOut() if held_out is None else held_out
        self._stop_rule = StopRule.of(config.run.stop_when) if config.run.stop_when else None
        self._now = now = clock.steady(now, lambda: asyncio.get_running_loop().time())
        self._progress = Progress()
        self._intake = Intake(
            config=config, workers=workers, sampler=sampler, ledger=ledger, listener=observer, progress=self._progress
        )
        self._evaluating: asyncio.Task[Evaluation] | None = None
        self._spans: list[Span] = []
        """Since the last report."""
        self._is_profiled = False
        self._updates = Updates(
            config=config, workers=workers, intake=self._intake, progress=self._progress, listener=observer, now=now
        )
        self._publisher = Publisher(
            config=config, workers=workers, intake=self._intake, progress=self._progress, listener=observer, now=now
        )
        self._saver = Saver(
            config=config,
            workers=workers,
            intake=self._intake,
            ledger=ledger,
            checkpoints=checkpoints,
            progress=self._progress,
            listener=observer,
            now=now,
        )

    # -- from outside

    async def run(self) -> None:
        """Train to the end. After an error of any kind the steps since the last checkpoint are saved, and its notes say
        so, or why not. WorkerLost, which WorkerHung is too, means that nobody is left who could save."""
        try:
            await self._publisher.begin()
            await self._saver.keep_best(self._held_out.best)
            await self._evaluate()
            while self._progress.step < self._config.run.steps and not self._progress.stop_requested:
                await self._train_one_step()
            await self._finish()
        except Exception as error:
            with first_error_stands():
                if isinstance(error, DeadlineError):
                    error.add_note(self.describe())  # now, while everything still waits
                if isinstance(error, WorkerLost):
                    await self._workers.end()  # so that nothing is waited for that a hung process owes
                else:
                    await self._save_after(error)
            raise
        finally:
            with first_error_stands():
                await self._end_tasks()
                await self._saver.wait_until_ended()

    @property
    def step(self) -> int:
        """Steps done."""
        return self._progress.step

    def request_stop(self) -> None:
        """Finish the step in hand, save, return."""
        self._progress.stop_requested = True

    def fail(self, error: BaseException) -> None:
        """End the run with this error, because something beside the loop has failed for good."""
        self._intake.fail(error)

    async def restore(self, folder: Path, state: RunState) -> None:
        """Take up a checkpoint. The ledger passed to the constructor is already the checkpoint's."""
        await self._saver.restore(folder, state)

    def describe(self) -> str:
        """Where the run stands and what everything in it is doing; for the message when it stalls."""
        progress = self._progress
        head = f"step {progress.step + 1} of {self._config.run.steps}, version {progress.version}"
        where = f"{head}; {self._intake.why_nothing_is_ready()}"
        return "\n".join([where, *self._workers.engines.describe(), *self._workers.open_calls()])

    # -- from the ready queue into the weights

    async def _train_one_step(self) -> None:
        first, last = self._config.run.profile_steps or (0, 0)
        await self._profile(first <= self._progress.step + 1 <= last)
        start_s, trained_version = self._now(), self._progress.version
        began_s = asyncio.get_running_loop().time()
        groups, outcome = await self._updates.make()
        self._spans += outcome.spans
        for group in groups:
            self._ledger.advance(group.group_id, GroupState.TRAINED, version=trained_version)
        self._progress.step += 1
        self._updates.is_under_way = False
        await self._flush_ledger()
        staged = await self._publisher.stage() if outcome.applied or self._is_colocated else None
        await self._saver.take_if_due()
        if staged is None:
            await self._publisher.wait_until_loaded()
            self._progress.served_step, self._progress.served_version = self._progress.step, self._progress.version
        else:
            await self._publisher.hand_over(staged)
        self._intake.end_step(asyncio.get_running_loop().time() - began_s)
        if self._progress.step % (self._config.eval.every or 1) == 0:
            await self._evaluate()
        await self._report(start_s, trained_version, groups, outcome)
        self._saver.write()  # not earlier: a resumed run takes the reports of its steps for written
        if not self._progress.stop_requested:
            self._intake.admit()

    async def _profile(self, is_on: bool) -> None:
        """Begin or end the profile of run.profile_steps, unless that was done before."""
        if is_on != self._is_profiled:
            self._is_profiled = is_on
            await or_hung("profiling", self._config.deadlines, "train_s", self._workers.profile(is_on))

    # -- evaluation and report

    async def _evaluate(self) -> None:
        """Begin to evaluate this step, if there are evaluations and it has none."""
        step, known = self._progress.step, self._held_out.rewards
        if not self._config.eval.every or step in known:
            self._stop_if_met({"step": step, "eval/reward": known.get(step)})
            return
        await self._wait_until_evaluated()
        await self._publisher.wait_until_loaded()
        self._saver.held_step, engines = step, self._workers.engines
        engine = await within("setting an engine aside", engines.patience_s, engines.pin())
        tasks, version = self._evaluation_tasks, self._progress.version
        evaluating = evaluate(self._config, self._workers, tasks, step=step, version=version, engine=engine)
        self._evaluating = asyncio.create_task(evaluating, name="evaluation")
        if self._is_colocated:
            await self._wait_until_evaluated()  # the engines are about to sleep

    async def _wait_until_evaluated(self) -> None:
        """Wait for the evaluation under way, if there is one, and report its result."""
        if self._evaluating is not None:
            self._observer.phase("evaluating")
            await asyncio.wait([self._evaluating])
            await self._tell_evaluation()

    async def _tell_evaluation(self) -> None:
        """Report the result of an evaluation that has ended; raises what made it fail."""
        if self._evaluating is None or not self._evaluating.done():
            return
        evaluation, self._evaluating = self._evaluating.result(), None
        self._spans += evaluation.spans
        self._held_out.rewards[evaluation.step] = evaluation.reward
        self._observer.evaluated(evaluation)
        await self._saver.keep_best(self._held_out.best)
        self._stop_if_met(evaluation.record())

    def _stop_if_met(self, metrics: Mapping[str, float | int | None]) -> None:
        if self._stop_rule is not None and not self.ended_early and self._stop_rule.is_met(metrics):
            self.ended_early = f"{self._stop_rule} since step {metrics['step']}"
            self.request_stop()

    async def _report(
        self, start_s: float, trained_version: int, groups: list[ReadyGroup], outcome: StepOutcome
    ) -> None:
        collected, publisher, saver = self._intake.collected.take(), self._publisher, self._saver
        await self._tell_evaluation()
        pause_s, publisher.pause_s = publisher.pause_s, 0.0
        spans = [*collected.spans, *self._spans, *publisher.spans, *saver.spans]
        self._spans, publisher.spans, saver.spans = [], [], []
        record = await self._observer.step(
            StepReport(
                step=self._progress.step,
                version=self._progress.version,
                start_s=start_s,
                end_s=self._now(),
                trained_version=trained_version,
                groups=groups,
                episodes=collected.episodes,
                shown=self._worst_and_best(groups),
                outcome=outcome,
                pause_s=pause_s,
                spans=spans,
                counts=self._ledger.counts(),
                num_ready=len(self._intake.ready),
                curriculum=self._intake.sampler.metrics(),
                num_zero_std=sum(_has_equal_rewards(group) for group in groups),
            )
        )
        self._stop_if_met(record)

    def _worst_and_best(self, groups: Sequence[ReadyGroup]) -> tuple[TrainedEpisode, TrainedEpisode]:
        places = [(group, index) for group in groups for index in range(len(group.episodes))]
        ranked = sorted(places, key=lambda place: place[0].episodes[place[1]].reward or 0.0)
        worst, best = (
            TrainedEpisode(
                task=self._intake.sampler.task(group.task_id),
                summary=group.episodes[index],
                advantages=group.advantages[index] if group.advantages else None,
                payload=group.payloads[index],
            )
            for group, index in (ranked[0], ranked[-1])
        )
        return worst, best

    # -- the end

    async def _finish(self) -> None:
        await self._profile(False)
        await self._wait_until_evaluated()
        await self._publisher.wait_until_loaded()
        await self._cancel_unfinished()
        if self.ended_early or self._progress.step >= self._config.run.steps:
            await self._evaluate()
            await self._wait_until_evaluated()
        await self._saver.wait_until_written()
        await self._save()
        await self._flush_ledger()

    async def _flush_ledger(self) -> None:
        await within("writing the ledger", self._config.deadlines.checkpoint_s, self._ledger.flush())

    async def _save(self, deadline_s: float | None = None) -> None:
        """Write a checkpoint of this moment, unless this step has one; returns when it is on disk.

        A checkpoint is given up when ready groups are lost meanwhile. It is then taken once more, without them. If that
        one is given up too, raises WorkerLost, so that the run goes on from the checkpoint before.
        """
        await self._saver.wait_until_ended()
        if self._saver.saved_step == self._progress.step:
            return
        await wake_trainer(self._config, self._workers)
        for _ in range(2):
            await self._saver.take(deadline_s)
            self._saver.write()
            await self._saver.wait_until_written()
            if self._saver.saved_step == self._progress.step:
                return
        raise WorkerLost("ready groups were lost, twice, while the last checkpoint was written")

    async def _cancel_unfinished(self) -> None:
        """End the groups that no step will use. Ready groups stay if the run may be resumed."""
        await self._end_tasks()
        self._intake.cancel_unfinished(keep_ready=self._progress.step < self._config.run.steps)

    async def _save_after(self, error: Exception) -> None:
        """Save the steps since the last checkpoint, if the trainer still answers and holds a single version."""
        why = "the steps since the last checkpoint could not be saved"
        try:
            await self._cancel_unfinished()
            if self._updates.is_under_way:
                error.add_note(f"{why}: the update may have been done in part, or not counted")
            else:
                await self._save(ANSWER_S if isinstance(error, WorkerError) else None)
                error.add_note(f"the run is saved as it was after step {self._progress.step}")
        except Exception as second:  # of any kind: the first error is the one to report
            is_same = str(second) == str(error)
            error.add_note(f"{why}, for the same reason" if is_same else f"{why}: {second or repr(second)}")

    async def _end_tasks(self) -> None:
        await self._intake.close()
        await self._publisher.close()
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.wait([self._evaluating])

    @property
    def _is_colocated(self) -> bool:
        return self._config.cluster.placement is Placement.colocated


def _has_equal_rewards(group: ReadyGroup) -> bool:
    """Whether there is nothing to compare, as nobody does in demonstrations."""
    return group.newest_version != NO_VERSION and len({episode.reward for episode in group.episodes}) == 1
