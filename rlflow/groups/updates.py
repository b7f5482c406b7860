"""The updates of one step: from the ready queue into the trainer's weights.

    take -> the groups of a step -> prepare -> for each epoch, for each minibatch: accumulate -> step -> StepOutcome

Rules: a step raises the version by one, however many updates it makes, because a version is what engines get. What
depends on the weights before its first update (recomputed log-probabilities, a critic's values) is computed once, in
`prepare`, lies in the object store with a handle at each group, and is freed when the step ends. If a step makes one
update only, gradients are added up while its groups come.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from rlflow.config import Config, Late, Placement
from rlflow.errors import RunError
from rlflow.groups.intake import Intake, PhaseListener, Progress
from rlflow.groups.minibatches import minibatches
from rlflow.roles import PROXIMAL, Mean, StepOutcome, TrainWork, Workers
from rlflow.runtime.deadlines import or_hung, within
from rlflow.runtime.derived import least_streamed_tokens, num_updates
from rlflow.types import ReadyGroup, Span

MAX_SKIPPED_UPDATES = 3
"""Updates in a row that may be skipped for a gradient that is not finite."""
AT_FIRST = "sampling/"
"""Metrics that compare engines and trainer: those of the first update count, because it changes the weights."""


class Updates:
    """Takes a step's groups and trains on them."""

    def __init__(
        self,
        *,
        config: Config,
        workers: Workers,
        intake: Intake,
        progress: Progress,
        listener: PhaseListener,
        now: Callable[[], float],
    ) -> None:
        self.is_under_way = False
        """True from the order to update until the caller, who counts the step, sets it back; False again if no update
        of the step was applied."""
        self._config = config
        self._is_colocated = config.cluster.placement is Placement.colocated
        self._workers = workers
        self._intake = intake
        self._progress = progress
        self._listener = listener
        self._skipped_in_a_row = 0
        self._now = now
        self._prepared: list[Span] = []
        """Since the last step."""

    async def make(self) -> tuple[list[ReadyGroup], StepOutcome]:
        """The groups of a step, after its last update, and what all of its updates did; the version is raised."""
        spans: list[Span] = []
        groups, waiting = await self._gather(spans)
        parts = list(self._parts(groups)) if num_updates(self._config.algorithm) > 1 else [waiting]
        await self._prepare(waiting)
        grader = self._intake.grader
        if grader.needs_log_ratios:
            grader.assign(groups)
        outcomes: list[StepOutcome] = []
        for number, part in enumerate(parts, 1):
            spans += await self._accumulate(part)
            outcomes.append(await self._update(is_last=number == len(parts)))
        for group in groups:
            group.values = None
            group.frozen.pop(PROXIMAL, None)
        outcome = of_step(outcomes)
        outcome.spans += [*self._prepared, *spans]
        if grader.needs_log_ratios:
            outcome.metrics |= grader.preferences(groups)
        self._prepared = []
        if outcome.applied:
            self._progress.version += 1
            self._intake.drop_late()
        return groups, outcome

    async def _gather(self, spans: list[Span]) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
        """A step's groups, and those of them whose gradients are not accumulated yet."""
        grader, config = self._intake.grader, self._config
        is_whole_step = grader.needs_batch or num_updates(config.algorithm) > 1
        together = is_whole_step or self._is_colocated or not config.trainer.streaming
        size = config.algorithm.groups_per_step
        groups: list[ReadyGroup] = []
        waiting: list[ReadyGroup] = []
        while len(groups) < size:
            self._listener.phase("waiting for episodes" if not len(self._intake.ready) else "training")
            taken = await self._intake.take(size - len(groups))
            groups += taken
            waiting += taken
            is_worth_it = sum(group.num_tokens for group in waiting) >= least_streamed_tokens(config.trainer)
            if not together and (is_worth_it or len(groups) == size):
                await self._prepare(waiting)
                spans += await self._accumulate(waiting)
                waiting = []
        await wake_trainer(config, self._workers)
        if together and not grader.needs_log_ratios:
            grader.assign(groups)
        return groups, waiting

    def _parts(self, groups: Sequence[ReadyGroup]) -> Iterator[list[ReadyGroup]]:
        """The groups of each update of a step."""
        by_id = {group.group_id: group for group in groups}
        algorithm, seed, step = self._config.algorithm, self._config.run.seed, self._progress.step
        for epoch in range(algorithm.epochs):
            for part in minibatches(list(by_id), algorithm.minibatches, seed=seed, step=step, epoch=epoch):
                yield [by_id[group_id] for group_id in part]

    async def _prepare(self, groups: Sequence[ReadyGroup]) -> None:
        if groups:
            self._listener.phase("training")
            start_s = self._now()
            preparing = self._workers.trainer.prepare(groups, self._oldest_trained)
            await or_hung("preparing groups for training", self._config.deadlines, "train_s", preparing)
            self._prepared.append(Span(actor="trainer", name="train", start_s=start_s, end_s=self._now()))

    async def _accumulate(self, groups: Sequence[ReadyGroup]) -> list[Span]:
        if not groups:
            return []
        self._listener.phase("training")
        accumulating = self._workers.trainer.accumulate(groups, self._oldest_trained)
        return await or_hung("accumulating gradients", self._config.deadlines, "train_s", accumulating)

    async def _update(self, *, is_last: bool) -> StepOutcome:
        has_applied, self.is_under_way = self.is_under_way, True
        stepping = self._workers.trainer.step(is_last=is_last)
        outcome = await or_hung("the optimiser step", self._config.deadlines, "train_s", stepping)
        self.is_under_way = has_applied or outcome.applied
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if outcome.num_skipped else 0
        if self._skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise RunError(
                f"the gradient was not finite {MAX_SKIPPED_UPDATES} times in a row (last norm {outcome.grad_norm}); "
                "lower trainer.learning_rate, or resume from an earlier checkpoint"
            )
        return outcome

    @property
    def _oldest_trained(self) -> int | None:
        """Tokens of older versions are masked; None masks nothing."""
        return self._intake.oldest_allowed if self._config.staleness.late is Late.mask else None


async def wake_trainer(config: Config, workers: Workers) -> None:
    """Give devices to the trainer that it shares with engines, if it does; they get them back with the next version."""
    if config.cluster.placement is Placement.colocated:
        engines, reloading = workers.engines, workers.trainer.reload
        await within("putting the engines to sleep", engines.patience_s, engines.sleep())
        await or_hung("bringing the trainer back to its devices", config.deadlines, "weights_s", reloading())


def of_step(outcomes: Sequence[StepOutcome]) -> StepOutcome:
    """What the updates of a step did together.

    Figures are means over the loss tokens of all of them, those of `AT_FIRST` excepted; `grad_norm` is the mean over
    the updates that were applied, if any was.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    first, last = outcomes[0], outcomes[-1]
    norms = [each.grad_norm for each in outcomes if each.applied] or [last.grad_norm]
    metrics: dict[str, Mean] = {}
    for outcome in outcomes:
        for name, mean in outcome.metrics.items():
            if outcome is first or not name.startswith(AT_FIRST):
                metrics[name] = metrics[name] + mean if name in metrics else mean
    peaks = zip_longest(*(each.memory_peaks for each in outcomes), fillvalue=0)
    return replace(
        last,
        applied=any(each.applied for each in outcomes),
        num_skipped=sum(each.num_skipped for each in outcomes),
        grad_norm=sum(norms) / len(norms),
        metrics=metrics,
        spans=[span for each in outcomes for span in each.spans],
        work=_added_up([each.work for each in outcomes if each.work is not None]),
        memory_peaks=[max(peak) for peak in peaks],
    )


def _added_up(works: Sequence[TrainWork]) -> TrainWork | None:
    if not works:
        return None
    return replace(
        works[0],
        tokens=sum(work.tokens for work in works),
        flops=sum(work.flops for work in works),
        padded_flops=sum(work.padded_flops for work in works),
    )
