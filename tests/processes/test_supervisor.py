"""The process above a process that runs other people's code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import misbehaving
from rlflow.environments.pool import EnvironmentPool

async def main():
    pool = EnvironmentPool(misbehaving.build)
    world = await pool.open(0, misbehaving.task_of())
    await world.reset(misbehaving.task_of("block", reset="print"))
    await world.step(misbehaving.reply_of())

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_die_with_their_parent() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    support = Path(__file__).parents[1] / "support"
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(support)), stderr=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stderr is not None
    async with asyncio.timeout(60):
        assert await parent.stderr.readline() == b"noise on standard output\n"
        parent.kill()
        # Standard error ends when the last process that holds it is gone.
        assert await parent.stderr.read() == b""
    await parent.wait()


PRINTS = """
import sys
from rlflow.processes import supervisor
supervisor.MAX_OUTPUT_BYTES = 1000
import os
life_read, life_write = os.pipe()
supervisor.supervise(life_read, [])
print("x" * 3000)
"""


def test_what_a_process_prints_is_bounded() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert "x" * 1000 in done.stderr
    assert done.stderr.endswith("\n[rlflow: what this process prints from here on is dropped]\n")


def test_a_terminal_is_not_flooded() -> None:
    ours, terminal = os.openpty()
    try:
        prints = PRINTS.replace("MAX_OUTPUT_BYTES = 1000", "MAX_TERMINAL_BYTES = 100").replace("3000", "300")
        subprocess.run([sys.executable, "-c", prints], stderr=terminal, timeout=60, check=True)
        assert b"what this process prints from here on is dropped" in os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(terminal)


ENDS = """
import os, signal, subprocess, sys
from rlflow.processes import supervisor
life_read, life_write = os.pipe()
supervisor.supervise(life_read, [])
assert subprocess.run(["sleep", "0"]).returncode == 0
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
sys.exit(5) if sys.argv[1] == "exit" else os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("kill", -signal.SIGTERM)])
def test_a_process_ends_as_its_worker_did_whatever_signals_it_inherited(how: str, code: int) -> None:
    def inherit() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])

    done = subprocess.run([sys.executable, "-c", ENDS, how], preexec_fn=inherit, timeout=60)
    assert done.returncode == code
