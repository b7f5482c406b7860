"""Tells people and files what the driver does: console, metrics.jsonl, trackers, trace, samples, report."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from rlflow.config import Config, Dtype
from rlflow.driver import StepReport
from rlflow.errors import RunError, describe_failure, first_error_stands
from rlflow.groups.evaluation import Evaluation, HeldOut
from rlflow.groups.ledger import DropReason
from rlflow.roles import Runners
from rlflow.rundir.directory import RunDir, plain
from rlflow.rundir.killed import KilledLog
from rlflow.rundir.restarts import Setback
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import dtype_of
from rlflow.telemetry import metrics, samples
from rlflow.telemetry.console import Console
from rlflow.telemetry.metrics import MetricsFile, StepRecord
from rlflow.telemetry.record import step_record
from rlflow.telemetry.report.report import write_report
from rlflow.telemetry.trace import Trace
from rlflow.telemetry.trackers import Tracker, open_trackers

MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |log-probability difference| between engine and trainer at the same version above which something is wrong."""
SHOW_S = 30.0
"""Seconds that training waits for the episodes that are shown."""


class RunObserver:
    """The driver's Observer of a real run. `runners` must be set before the first step."""

    def __init__(self, config: Config, run_dir: RunDir, setback: Setback | None = None) -> None:
        """`setback` is the loss that this start makes up for; None for a start without one."""
        self.runners: Runners | None = None
        self.num_steps = run_dir.state.step if run_dir.state else 0
        """Steps done so far."""
        self._setback = setback
        self._config = config
        self._run_dir = run_dir
        metrics.truncate_after(run_dir.metrics, self.num_steps)
        before = metrics.read(run_dir.metrics) if run_dir.metrics.is_file() else []
        self._num_tokens = int(before[-1]["num_tokens"]) if before else 0
        self._rewards: list[float] = [record["reward"] for record in before]
        self._since_s: float | None = None
        self._file = MetricsFile(run_dir.metrics)
        metrics.truncate_after(run_dir.evaluations, self.num_steps)
        before = metrics.read(run_dir.evaluations) if run_dir.evaluations.is_file() else []
        self.held_out = HeldOut.of(before)
        """The driver adds to it."""
        self._evaluations: MetricsFile | None = None
        if config.eval.every:
            self._evaluations = MetricsFile(run_dir.evaluations, required=metrics.EVALUATION)
        self._trace = Trace(run_dir.path / "trace.json")
        self._console = Console(config.run.steps, run_dir.path)
        self._killed = KilledLog(run_dir.path)
        failed = None if setback is None else self._tell_of_tracker  # at first, a person is there who can mend it
        self._trackers = open_trackers(config.trackers, run_dir.path, flatten(plain(config)), failed)
        self._closing = ExitStack()
        for each in (self._file, self._evaluations, self._trace):
            if each is not None:
                self._closing.callback(each.close)
        self._closing.callback(self._tell_trackers, Tracker.close)

    def __enter__(self) -> Self:
        self._closing.enter_context(self._console)
        return self

    def __exit__(self, *_: object) -> None:
        with first_error_stands():
            self._closing.close()

    def message(self, text: str) -> None:
        self._console.message(text)

    def alarm(self, text: str) -> None:
        self._tell_of_the_hung()
        self._console.alarm(text)

    def phase(self, name: str) -> None:
        self._console.phase(name)

    def dropped(self, group_id: int, reason: DropReason, detail: str) -> None:
        if reason in (DropReason.FAILED, DropReason.NO_VERDICT):
            self.alarm(f"group {group_id} dropped ({reason}): {detail}")

    def waiting(self, reason: str) -> None:
        self._console.message(f"no group to train on yet: {reason}")

    def evaluated(self, evaluation: Evaluation) -> None:
        assert self._evaluations is not None, "evaluations need eval.every"
        record = evaluation.record()
        self._evaluations.append(record)
        # Kinds of tasks have any names, and some trackers take few.
        told = {name: value for name, value in record.items() if "/kind/" not in name}
        self._tell_trackers(lambda tracker: tracker.log(evaluation.step, told))
        if evaluation.reward is None:
            self._console.alarm(f"the evaluation of version {evaluation.version} was lost: {evaluation.detail}")
            return
        self._console.message(
            f"evaluation of version {evaluation.version}: reward {evaluation.reward:.3f} over "
            f"{evaluation.num_episodes} episodes, {evaluation.num_failed} failed"
        )

    def saved(self, folder: Path) -> None:
        self._console.message(f"saved {folder}")

    def given_up(self, step: int, why: str) -> None:
        self._console.alarm(f"the checkpoint of step {step} is given up: its ready groups cannot be written: {why}")

    async def step(self, report: StepReport) -> StepRecord:
        self.num_steps = report.step
        since_s = report.start_s if self._since_s is None else self._since_s
        record = step_record(
            report,
            since_s=since_s,
            num_tokens_before=self._num_tokens,
            is_bfloat16=self._config.model.dtype is Dtype.bfloat16,
        )
        self._since_s, self._num_tokens = report.end_s, int(record["num_tokens"] or 0)
        self._rewards.append(float(record["reward"] or 0.0))
        self._file.append(record)
        self._trace.add(report.spans)
        self._tell_trackers(lambda tracker: tracker.log(report.step, record))
        self._console.step(record)
        self._tell_of_the_hung()
        self._check(report, record)
        if self._setback is not None and report.step == self._setback.step:
            self.message(f"step {report.step} is done again, {self._setback.seconds:.0f} s after the loss")
        if report.step % self._config.run.show_samples_every == 0 or report.step == 1:
            await self._show(report)
        return record

    def finish(self, ended_early: str = "") -> None:
        """Write the report and say where it is, and why the run has ended before its last step."""
        if not self._rewards:
            return
        report = write_report(self._run_dir.path)
        first, last = self._rewards[:5], self._rewards[-5:]
        self._console.message(
            f"reward: first {len(first)} steps {sum(first) / len(first):.3f}, last {len(last)} steps "
            f"{sum(last) / len(last):.3f}{f'; {self.held_out}' if str(self.held_out) else ''}"
            f"{f'; ended early: {ended_early}' if ended_early else ''}\nreport: {report}"
        )

    def _tell_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """Trackers are other people's code and services: one that fails is left out, and the run goes on."""
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._tell_of_tracker(type(tracker).__name__, error)

    def _tell_of_tracker(self, name: str, error: Exception) -> None:
        why = describe_failure(error)
        self.alarm(f"{name} fails, and gets nothing more of this run: {why}; metrics.jsonl has every step")

    def _tell_of_the_hung(self) -> None:
        for line in self._killed.news():
            self._console.alarm(line)

    def _check(self, report: StepReport, record: StepRecord) -> None:
        if not report.outcome.applied:
            self._console.alarm(f"step {report.step}: the gradient was not finite; the update was skipped")
        difference = record["sampling/logp_difference_mean"]
        limit = MISMATCH_ALARM[dtype_of(self._config).value]
        if difference is not None and difference > limit and record["staleness/max"] == 0:
            self._console.alarm(
                f"step {report.step}: engine and trainer disagree at the same version: mean |log-probability "
                f"difference| "
                f"{difference:.2g}, expected below {limit:g}"
            )

    async def _show(self, report: StepReport) -> None:
        """Nobody trains on what is shown, so that a runner that hangs or fails is only told."""
        assert self.runners is not None, "set runners before the first step"
        reading = asyncio.gather(*(self.runners.transcript(shown.payload) for shown in report.shown))
        try:
            conversations = await within("reading the episodes to show", SHOW_S, reading)
        except RunError as error:
            self.alarm(f"the samples of step {report.step} cannot be shown: {error}")
            return
        worst, best = map(samples.shown_episode, report.shown, conversations)
        samples.write_samples(self._run_dir.path, report.step, best, worst)
        self._console.samples(best, worst)


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys, as trackers take them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
