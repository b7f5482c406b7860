"""Tells people and files what the driver does: console, metrics.jsonl, trackers, trace, samples, report."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Self

from rlflow.algorithms.advantage.base import Scope
from rlflow.algorithms.registry import chosen_advantage
from rlflow.config import Config, Dtype
from rlflow.driver import StepReport
from rlflow.errors import RunError, describe_failure, first_error_stands
from rlflow.groups.evaluation import Evaluation, HeldOut
from rlflow.groups.ledger import DropReason
from rlflow.roles import Runners
from rlflow.rundir.directory import RunDir, flatten, plain
from rlflow.rundir.killed import KilledLog
from rlflow.rundir.restarts import Setback
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import dtype_of
from rlflow.telemetry import about, metrics, samples
from rlflow.telemetry.console import Console
from rlflow.telemetry.health import Alarm, Health
from rlflow.telemetry.metrics import MetricsFile, StepRecord
from rlflow.telemetry.record import step_record
from rlflow.telemetry.report.report import write_report
from rlflow.telemetry.status import StatusFile
from rlflow.telemetry.trace import Trace
from rlflow.telemetry.trackers import Tracker, open_trackers

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
        self._rewards: list[float | None] = [record["reward"] for record in before]
        self._since_s: float | None = None
        self._file = MetricsFile(run_dir.metrics)
        metrics.truncate_after(run_dir.evaluations, self.num_steps)
        evaluated = metrics.read(run_dir.evaluations) if run_dir.evaluations.is_file() else []
        self.held_out = HeldOut.of(evaluated)
        """The driver adds to it."""
        self._evaluations: MetricsFile | None = None
        if config.eval.every:
            self._evaluations = MetricsFile(run_dir.evaluations, required=metrics.EVALUATION)
        metrics.truncate_after(run_dir.health, self.num_steps)
        self._alarms = MetricsFile(run_dir.health, required=())
        traits = chosen_advantage(config).traits
        is_by_group, has_dropout = traits.compares and traits.scope is Scope.group, config.lora.dropout > 0
        self._health = Health(within_groups=is_by_group, dtype=dtype_of(config).value, has_dropout=has_dropout)
        self._health.replay(before, evaluated)  # what it found is in the file
        self._trace = Trace(run_dir.path / "trace.json")
        is_asynchronous = config.staleness.max_versions > 0
        self._console = Console(config.run.steps, run_dir.path, before=before, is_asynchronous=is_asynchronous)
        self._killed = KilledLog(run_dir.path)
        self.status = StatusFile(run_dir.path, self.alarm)
        failed = None if setback is None else self._tell_of_tracker  # at first, a person is there who can mend it
        self._trackers = open_trackers(config.trackers, run_dir.path, flatten(plain(config)), failed)
        self._closing = ExitStack()
        if setback is None:
            about.begin(run_dir.path, sys.orig_argv[1:])  # Hydra is given other ones
        for each in (self._file, self._evaluations, self._alarms, self._trace):
            if each is not None:
                self._closing.callback(each.close)
        self._closing.callback(self._tell_trackers, Tracker.close)

    def __enter__(self) -> Self:
        self._closing.enter_context(self._console)
        return self

    def __exit__(self, *_: object) -> None:
        with first_error_stands():
            self._closing.callback(about.amend, self._run_dir.path, ended=about.now(), steps=self.num_steps)
            self._closing.close()

    def message(self, text: str) -> None:
        self._console.message(text)

    def alarm(self, text: str) -> None:
        self._tell_of_the_hung()
        self._console.alarm(text)

    def phase(self, name: str) -> None:
        self._console.phase(name)
        self.status.phase(name)

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
        self._tell(self._health.evaluated(record))
        if evaluation.reward is None:
            self._console.alarm(f"the evaluation of version {evaluation.version} was lost: {evaluation.detail}")
            return
        self._console.evaluated(evaluation.reward)
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
        self._rewards.append(record["reward"])
        self._file.append(record)
        self._trace.add(report.spans, step=report.step)
        self._tell_trackers(lambda tracker: tracker.log(report.step, record))
        self._console.step(record)
        self._tell_of_the_hung()
        self._tell(self._health.step(record))
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
        known = [reward for reward in self._rewards if reward is not None]
        first, last = known[:5], known[-5:]
        rewards = (
            "none was asked for"
            if not known
            else (
                f"first {len(first)} steps {sum(first) / len(first):.3f}, last {len(last)} steps "
                f"{sum(last) / len(last):.3f}"
            )
        )
        self._console.message(
            f"reward: {rewards}{f'; {self.held_out}' if str(self.held_out) else ''}"
            f"{f'; ended early: {ended_early}' if ended_early else ''}\nreport: {report}"
        )
        told = ", ".join(f"{name} since step {since}" for name, since in self._health.told.items())
        self._console.message(f"alarms: {told or 'none'}")
        if not self._health.has_signal:
            self._console.alarm(
                "no step of this run carried a signal: no episode was better than those it was compared with, so that "
                "nothing was learned. Look at samples/ and at how the episodes ended"
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

    def _tell(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self._alarms.append(asdict(alarm))
            if alarm.state == "ended":
                self._console.message(str(alarm))
            else:
                self._console.alarm(str(alarm))
                self._tell_trackers(lambda tracker, text=str(alarm): tracker.alarm(text))

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
        table = [samples.table_row("best", best), samples.table_row("worst", worst)]
        self._tell_trackers(lambda tracker: tracker.samples(report.step, table))
        self._console.samples(best, worst)
