"""What the observer of a real run asks of the workers, and what becomes of it when they do not answer."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import make_world, run_virtually

from rlflow.config import Config
from rlflow.driver import StepReport
from rlflow.errors import ConfigError, RunError, WorkerLost
from rlflow.groups.evaluation import Evaluation
from rlflow.groups.scores import Score
from rlflow.roles import Mean, Runners
from rlflow.rundir.directory import RunDir
from rlflow.rundir.restarts import Setback
from rlflow.rundir.store import CheckpointStore, RunState
from rlflow.telemetry import about
from rlflow.telemetry.metrics import REQUIRED
from rlflow.telemetry.observer import RunObserver
from rlflow.telemetry.samples import read_samples
from rlflow.types import Message, PayloadRef


class Answers:
    async def transcript(self, payload: PayloadRef) -> list[Message]:
        return [{"role": "assistant", "content": f"conversation of {payload}"}]


class Hangs:
    async def transcript(self, payload: PayloadRef) -> list[Message]:
        await asyncio.sleep(1e9)
        raise AssertionError


class Fails:
    def __init__(self, error: RunError) -> None:
        self._error = error

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        raise self._error


def report_of_a_step(folder: Path) -> StepReport:
    world = make_world(folder, steps=1)
    run_virtually(world.driver.run())
    (report,) = world.observer.reports
    report.outcome.metrics |= dict.fromkeys(("entropy", "sampling/logp_difference_mean"), Mean(total=0.0, count=1.0))
    return report


@pytest.mark.parametrize(
    ("runners", "shown"),
    [
        (Answers(), "conversation of "),
        (Hangs(), "ALARM: the samples of step 1 cannot be shown: reading the episodes to show did not finish within"),
        (Fails(WorkerLost("it died")), "ALARM: the samples of step 1 cannot be shown: it died"),
        (Fails(RunError("no room")), "ALARM: the samples of step 1 cannot be shown: no room"),
    ],
)
def test_samples_are_shown_or_an_alarm_says_why_not(
    runners: object, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of_a_step(tmp_path)
    config = Config()
    config.trackers.tensorboard = False
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None)

    async def tell() -> float:
        with RunObserver(config, run_dir) as observer:
            observer.runners = cast(Runners, runners)
            await observer.step(report)
        return asyncio.get_running_loop().time()

    assert run_virtually(tell()) <= 30
    assert shown in capsys.readouterr().out
    [start] = about.read(tmp_path)
    assert start["steps"] == 1 and start["ended"] >= start["started"]
    if isinstance(runners, Answers):
        best, trained = read_samples(tmp_path, 1).best, report.shown[1]
        assert (best.answer, best.metrics) == (trained.task.answer, trained.summary.metrics)
        assert best.advantages == trained.advantages and trained.advantages is not None
        assert best.figures == {"prompt_tokens": 3, "completion_tokens": 2, "oldest_version": 0, "newest_version": 0}


def test_the_last_line_says_what_was_held_out_and_why_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two evaluations was written before a resume."""
    report = report_of_a_step(tmp_path)
    config = Config()
    config.trackers.tensorboard, config.eval.every = False, 1
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None)

    async def tell() -> None:
        for step, reward in ((0, 0.25), (1, 0.75)):
            with RunObserver(config, run_dir) as observer:
                evaluation = Evaluation(step=step, version=step, scores=[Score(num_tasks=1, reward=reward)])
                observer.held_out.rewards[step] = reward
                observer.evaluated(evaluation)
                if step == 1:
                    observer.runners = cast(Runners, Answers())
                    assert (await observer.step(report))["step"] == 1
                    observer.finish("eval/reward>=0.7 since step 1")

    run_virtually(tell())
    out = capsys.readouterr().out
    assert "held-out 0.250 -> 0.750 (best 0.750 at step 1); ended early: eval/reward>=0.7 since step 1" in out


def test_a_tracker_that_does_not_start_again_after_a_loss_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as if it was not installed
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None)
    config = Config()
    config.trackers.mlflow_experiment = "e"
    with pytest.raises(ConfigError, match="mlflow"):
        RunObserver(config, run_dir)
    with RunObserver(config, run_dir, Setback(step=3)) as observer:
        observer.message("goes on")
    alarm, told = capsys.readouterr().out.splitlines()
    assert alarm.startswith("ALARM: MlflowTracker fails, and gets nothing more of this run: ConfigError: ")
    assert told == "goes on"


async def test_what_fails_at_the_end_does_not_take_the_place_of_the_first_error(tmp_path: Path) -> None:
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None)

    def broken() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(KeyError, match="the first") as caught, RunObserver(Config(), run_dir) as observer:
        cast(Any, observer)._closing.callback(broken)
        raise KeyError("the first")
    (note,) = caught.value.__notes__
    assert note.startswith("then: OSError: [Errno 28] No space left on device (")


def test_a_resumed_run_shows_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    lines = [dict.fromkeys(REQUIRED, 0.5) | {"step": step, "num_tokens": 9} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = cast(RunState, SimpleNamespace(step=2))
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None, state=state)
    with RunObserver(Config(), run_dir):
        pass
    assert "step 2/100" in stream.getvalue()
    assert "reward \x1b[1;32m0.5\x1b[0m" in stream.getvalue()


@pytest.mark.parametrize(("reward", "has_signal"), [(0.0, False), (1.0, True)])
def test_the_last_lines_name_the_alarms_and_say_when_nothing_was_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: float, has_signal: bool
) -> None:
    same = {"frac_reward_zero_std": 1.0, "reward": 0.0, "reward_std": 0.0, "groups/trained": 24}
    lines = [dict.fromkeys(REQUIRED, 0.0) | same | {"step": step} for step in (1, 2, 3)]
    lines.append(lines[0] | {"step": 4, "reward": reward, "frac_reward_zero_std": 1.0 - reward})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = cast(RunState, SimpleNamespace(step=4))
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None, state=state)
    with RunObserver(Config(), run_dir) as observer:
        observer.finish()
    out = capsys.readouterr().out
    assert "\nalarms: constant_reward since step 1\n" in out
    assert ("ALARM: no step of this run carried a signal" in out) is not has_signal


async def test_alarms_reach_the_console_the_file_and_the_trackers_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    tracker = SimpleNamespace(alarm=told.append, log=lambda step, record: None, close=lambda: None)
    monkeypatch.setattr("rlflow.telemetry.observer.open_trackers", lambda *_: [tracker])
    world = make_world(tmp_path, steps=2)
    await world.driver.run()
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path, keep=1), resume_from=None)
    with RunObserver(Config(), run_dir) as observer:
        observer.runners = cast(Runners, Answers())
        for report in world.observer.reports:
            gaps = dict.fromkeys(("entropy", "sampling/logp_difference_mean"), Mean(total=0.5, count=1.0))
            report.outcome.metrics |= gaps
            await observer.step(report)
    (line,) = (tmp_path / "alarms.jsonl").read_text().splitlines()
    alarm = json.loads(line)
    assert (alarm["step"], alarm["name"], alarm["state"], alarm["since"]) == (1, "mismatch", "began", 1)
    assert capsys.readouterr().out.count("ALARM: mismatch since step 1: engine and trainer disagree at the same") == 1
    assert len(told) == 1 and told[0].startswith("mismatch since step 1: engine and trainer disagree")
