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
from rlflow.errors import PayloadLost, WorkerLost
from rlflow.rundir.store import CheckpointStore
from rlflow.runtime.signals import Stopper


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
    fleet: Any = SimpleNamespace(is_joined=True, end=end, vital={"trainer rank 0": None})
    async with asyncio.timeout(30):
        with pytest.raises(PayloadLost):
            await start.run_unless_lost(fleet, work())
    assert ended == [fleet]


def test_a_loss_after_a_signal_ends_the_run_as_the_signal_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[str] = []
    checkpoints = CheckpointStore(tmp_path, keep=1)
    checkpoints.path(4).mkdir()
    observer = SimpleNamespace(alarm=alarms.append, message=alarms.append)

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
    run = SimpleNamespace(config=Config(), run_dir=SimpleNamespace(checkpoints=checkpoints), state=None, setback=None)
    try:
        assert asyncio.run(running._train(cast(Any, run))) is signal.SIGTERM
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    assert alarms == [
        "stopping: finishing the step and saving; Ctrl-C once more to leave at once",
        "the trainer rank 0 died; step 4 is the last that was saved, and the run was asked to stop",
    ]
