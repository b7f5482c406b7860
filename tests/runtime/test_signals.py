"""What SIGINT, SIGTERM and SIGHUP do to a run; real ones, to this process or to one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from rlflow.runtime.signals import Stopper, hang_ups_ignored, run_until_done

SECOND = """
import asyncio, os, signal
from rlflow.runtime.signals import Stopper

async def run():
    stopper = Stopper(lambda: "step 4 is the last that was saved")
    os.kill(os.getpid(), signal.SIGTERM)
    await stopper.run_unless_stopped(asyncio.Event().wait(), print)
    stopper.restore()

asyncio.run(run())
os.kill(os.getpid(), signal.SIGTERM)
print("ended by itself")
"""


def test_a_signal_that_came_before_there_was_a_driver_reaches_it() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        stopper = Stopper(lambda: "nothing has been saved yet")
        try:
            assert await stopper.run_unless_stopped(asyncio.sleep(0, "fleet"), seen.append) == "fleet"
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(30):
                while stopper.signal is None:
                    await asyncio.sleep(0)
            stopper.hand_to(lambda: seen.append("asked"))
        finally:
            stopper.restore()
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
        return seen

    assert asyncio.run(run()) == ["stopping; nothing has been saved yet", "asked"]


def test_a_second_sigterm_while_the_process_ends_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["stopping; step 4 is the last that was saved", "ended by itself"]


HUNG_UP = """
import asyncio, os, signal, sys
from rlflow.runtime.signals import Stopper

async def run():
    stopper = Stopper(lambda: "nothing has been saved yet")
    os.kill(os.getpid(), signal.SIGHUP)
    async def start():
        for _ in range(100):
            await asyncio.sleep(0)
        return "went on"
    print(await stopper.run_unless_stopped(start(), print), stopper.signal)
    stopper.restore()

asyncio.run(run())
os.kill(os.getpid(), signal.SIGHUP)
print("ended by itself")
"""


@pytest.mark.parametrize(
    ("nohup", "printed"),
    [
        ([], ["stopping; nothing has been saved yet", "None 1", "ended by itself"]),
        (["nohup"], ["went on None", "ended by itself"]),
    ],
)
def test_a_terminal_that_goes_away_stops_a_run_unless_it_was_told_to_ignore_that(
    nohup: list[str], printed: list[str]
) -> None:
    command = [*nohup, sys.executable, "-c", HUNG_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, printed)


def test_what_a_run_starts_survives_its_terminal() -> None:
    with hang_ups_ignored():
        child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 1); print('alive')"])
    assert child.wait(timeout=60) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def finishes_its_step(seen: list[str]) -> str:
    """A run that is asked to stop before its third step; each step sends this process a SIGINT."""
    stopper = Stopper(lambda: "nothing has been saved yet")
    try:
        assert await stopper.run_unless_stopped(asyncio.sleep(0, "fleet"), seen.append) == "fleet"
        asked = asyncio.Event()
        stopper.hand_to(asked.set)
        seen.append(threading.current_thread().name.partition("_")[0])
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(30):
            await asked.wait()
        return "saved"
    finally:
        stopper.restore()


async def never_finishes(seen: list[str]) -> None:
    await finishes_its_step(seen)
    stopper = Stopper(lambda: "nothing has been saved yet")
    os.kill(os.getpid(), signal.SIGINT)
    try:
        async with asyncio.timeout(30):
            while stopper.signal is None:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
    finally:
        seen.append("cleaned up")
        stopper.restore()


def test_a_cell_s_run_has_a_thread_and_a_loop_of_its_own_and_still_gets_signals(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def handler(number: int, frame: object) -> None: ...

    async def cell() -> None:
        seen: list[str] = []
        assert run_until_done(finishes_its_step(seen)) == "saved"
        assert seen == ["rlflow", "stopping: finishing the step and saving; Ctrl-C once more to leave at once"]
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            run_until_done(never_finishes(seen))
        assert seen[2:] == ["cleaned up"]
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [handler, handler]

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    loop = asyncio.new_event_loop()  # asyncio.run would handle SIGINT by itself
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()
        for number, what in before.items():
            signal.signal(number, what)
    assert "stopped at once; the last complete checkpoint is kept" in capfd.readouterr().err


async def test_a_thread_that_gets_no_signals_can_run_too() -> None:
    seen: list[str] = []

    async def work() -> str:
        stopper = Stopper(lambda: "nothing has been saved yet")
        started = await stopper.run_unless_stopped(asyncio.sleep(0, "fleet"), seen.append)
        stopper.restore()
        return str(started)

    def in_a_thread() -> str:
        with hang_ups_ignored():
            return run_until_done(work())

    assert await asyncio.to_thread(in_a_thread) == "fleet"
