"""What SIGINT and SIGTERM do to a run; real ones, to this process or to one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from rlflow.runtime.signals import Stopper

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
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return seen

    assert asyncio.run(run()) == ["stopping; nothing has been saved yet", "asked"]


def test_a_second_sigterm_while_the_process_ends_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["stopping; step 4 is the last that was saved", "ended by itself"]
