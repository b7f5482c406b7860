"""What a run does when it loses what it cannot do without, with fakes in place of the fleet."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlflow import run as running
from rlflow.cluster import start
from rlflow.config import Config
from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerHung, WorkerLost
from rlflow.rundir.directory import RunDir
from rlflow.rundir.store import CheckpointStore
from rlflow.runtime.signals import Stopper
from rlflow.telemetry.status import StatusFile


async def test_a_lost_payload_ends_the_fleet_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the cluster has other machines, whose loss would be waited for after another error."""
    ended: list[object] = []

    async def nothing_lost(who: str, actor: object) -> None:
        await asyncio.Event().wait()

    async def end() -> None:
        ended.append(fleet)

    async def work() -> None:
        raise PayloadLost("what the trainer was to read is lost")

    monkeypatch.setattr(start, "wait_until_ended", nothing_lost)
    fleet: Any = SimpleNamespace(is_joined=True, has_ended=False, end=end, vital={"trainer rank 0": None})
    async with asyncio.timeout(30):
        with pytest.raises(PayloadLost):
            await start.run_unless_lost(fleet, work())
    assert ended == [fleet]


def test_a_loss_after_a_signal_ends_the_run_as_the_signal_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[str] = []
    checkpoints = CheckpointStore(tmp_path, keep=1)
    checkpoints.path(4).mkdir()
    status = StatusFile(tmp_path, alarms.append)
    observer = SimpleNamespace(alarm=alarms.append, message=alarms.append, status=status)

    async def start(run: object, observer: object) -> object:
        return SimpleNamespace(stop=stop)

    async def drive(run: object, observer: object, fleet: object, stopper: Stopper) -> int:
        stopper.hand_to(lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            while stopper.signal is None:
                await asyncio.sleep(0)
        raise WorkerLost("the trainer rank 0 died")

    async def as_it_is(fleet: object, work: Any) -> Any:
        return await work

    async def stop() -> None:
        pass

    for name, fake in (("_start", start), ("_drive", drive), ("run_unless_lost", as_it_is)):
        monkeypatch.setattr(running, name, fake)
    monkeypatch.setattr(running, "RunObserver", lambda *arguments: nullcontext(observer))
    run = SimpleNamespace(config=Config(), run_dir=SimpleNamespace(checkpoints=checkpoints, state=None), setback=None)
    try:
        assert asyncio.run(running._train(cast(Any, run))) is signal.SIGTERM
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    assert alarms == [
        "stopping: finishing the step and saving; Ctrl-C once more to leave at once",
        "the trainer rank 0 died; step 4 is the last that was saved, and the run was asked to stop",
    ]


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_fault_is_told_in_one_line_and_its_traceback_is_kept(is_writable: bool, tmp_path: Path) -> None:
    if not is_writable:
        (tmp_path / "traceback.txt").mkdir()
    with pytest.raises(RunError) as caught, running._faults_kept_in(tmp_path):
        error = ZeroDivisionError("a share of nothing")
        error.add_note("the run is saved as it was after step 3")
        raise error
    first, *lines = str(caught.value).splitlines()
    told = "ZeroDivisionError: a share of nothing (test_losses.py:"
    assert first.startswith(told) and "; this is a fault of rlflow or of a plugin, and its traceback is" in first
    assert caught.value.__notes__ == ["the run is saved as it was after step 3"]
    traceback = (tmp_path / "traceback.txt").read_text().splitlines() if is_writable else lines
    assert (bool(lines), traceback[0]) == (not is_writable, "Traceback (most recent call last):")
    assert "ZeroDivisionError: a share of nothing" in traceback


def test_the_traceback_of_a_fault_may_hold_half_a_character(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^KeyError: .*its traceback is in "), running._faults_kept_in(tmp_path):
        raise KeyError("\ud800") from ValueError("no such key: \ud800")
    assert "ValueError: no such key: \\ud800" in (tmp_path / "traceback.txt").read_text().splitlines()


@pytest.mark.parametrize("error", [ConfigError("wrong"), RunError("broken"), WorkerLost("lost")])
def test_an_error_that_was_written_for_people_is_told_as_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, running._faults_kept_in(tmp_path):
        raise error
    assert caught.value is error
    assert not list(tmp_path.iterdir())


def run_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, list[str], list[int]]:
    """A run whose trainer hangs in every fleet, and never gets as far as a checkpoint; what it tells; its fleets."""
    told: list[str] = []
    fleets: list[int] = []
    status = StatusFile(tmp_path, told.append)
    observer = SimpleNamespace(alarm=told.append, message=told.append, phase=lambda _: None, num_steps=0, status=status)

    async def stop() -> None:
        raise OSError("the fleet cannot be stopped")

    async def start(run: object, observer: object) -> object:
        fleets.append(len(fleets))
        return SimpleNamespace(stop=stop if len(fleets) == 4 else lambda: asyncio.sleep(0))

    async def drive(run: object, observer: object, fleet: object, stopper: Stopper) -> int:
        error = WorkerHung("accumulating gradients", 20.0, "raise deadlines.train_s if it takes this long")
        error.add_note("engine 0: healthy")
        raise error

    async def as_it_is(fleet: object, work: Any) -> Any:
        return await work

    for name, fake in (("_start", start), ("_drive", drive), ("run_unless_lost", as_it_is)):
        monkeypatch.setattr(running, name, fake)
    monkeypatch.setattr(running, "RunObserver", lambda *arguments: nullcontext(observer))
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=1), resume_from=None)
    run = running._Run(
        config=Config(),
        spec=cast(Any, None),
        tasks=(),
        rows="",
        evaluation_tasks=(),
        model_path="",
        reward_models={},
        run_dir=run_dir,
    )
    return run, told, fleets


def test_a_rank_that_hangs_is_restarted_three_times_and_then_the_deadline_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told, fleets = run_that_hangs(monkeypatch, tmp_path)
    with pytest.raises(WorkerHung, match="^accumulating gradients did not finish .*raise deadlines.train_s") as caught:
        asyncio.run(running._train(run))
    assert fleets == [0, 1, 2, 3]
    assert (
        len([line for line in told if "accumulating gradients did not finish within its deadline of 20 s" in line]) == 3
    )
    assert told.count("engine 0: healthy") == 3, "what everything did is told too"
    state, never_got_far, then = caught.value.__notes__
    assert state == "engine 0: healthy"
    assert never_got_far.startswith("the run was started again 3 times from step 0, and never got as far as its")
    assert then.startswith("then: OSError: the fleet cannot be stopped")
