"""Hung processes are killed, and busy ones are not: what decides, by table, and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlflow.processes.companion import Look, Status, is_at_work, is_hung, is_left_stopped
from rlflow.rundir.killed import NAME, KilledLog

HEARTBEAT_S = 1.0
TIMEOUT_S = 120


def still(count: int, cpu_s: float = 1.0) -> list[Look]:
    return [(False, cpu_s)] * count


@pytest.mark.parametrize(
    ("looks", "hangs"),
    [
        pytest.param([], False, id="it has just beaten"),
        pytest.param(still(7), False, id="not for long enough"),
        pytest.param(still(8), True, id="it does nothing"),
        pytest.param([(True, 1.0)] * 8, False, id="it waits for a core, or a disk"),
        pytest.param([(True, 1.0)] * 3 + still(8), True, id="it has been busy before"),
        pytest.param([*still(6), (True, 1.0), (True, 1.0)], True, id="a thread without Python has worked"),
        pytest.param([*still(5), *[(True, 1.0)] * 3], False, id="it works now and then"),
        pytest.param([(False, 1.0 + 0.1 * n) for n in range(8)], True, id="70 ms in a second each, of 20 s"),
        pytest.param([(False, 1.0 + 0.5 * n) for n in range(8)], False, id="it was never seen at work and has worked"),
    ],
)
def test_what_hangs(looks: list[Look], hangs: bool) -> None:
    assert is_hung(looks, heartbeat_s=20.0) is hangs


@pytest.mark.parametrize(
    ("states", "works"), [("SSS", False), ("TTT", False), ("SRS", True), ("SDS", True), ("ttt", True), ("", False)]
)
def test_what_is_at_work(states: str, works: bool) -> None:
    assert is_at_work(states) is works


def status(state: str, terminal: int = 0) -> Status:
    return Status(f"77 (a (b) c) {state} 12 77 77 {terminal} -1 4194304 1 0 0 0 250 50 0 0 20 0 3 0 98765 1 1")


def test_what_the_kernel_says_of_a_process_is_read() -> None:
    read = status("T", terminal=34816)
    assert (read.name, read.state, read.parent, read.terminal) == ("a (b) c", "T", 12, 34816)
    assert (read.cpu_s, read.started) == (300 / os.sysconf("SC_CLK_TCK"), "98765")


@pytest.mark.parametrize(
    ("process", "parent", "terminal", "is_left"),
    [
        pytest.param(status("T"), status("S"), 0, True, id="stopped"),
        pytest.param(status("S"), status("S"), 0, False, id="asleep"),
        pytest.param(status("t"), status("S"), 0, False, id="in a debugger"),
        pytest.param(status("T"), status("T"), 0, False, id="stopped with its parent"),
        pytest.param(status("T", 34816), status("S"), 34816, True, id="on the terminal of the run"),
        pytest.param(status("T", 34817), status("S"), 34816, False, id="a job of a shell"),
    ],
)
def test_what_is_left_stopped(process: Status, parent: Status, terminal: int, is_left: bool) -> None:
    assert is_left_stopped(process, parent, terminal) is is_left


ACTOR = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from rlflow.processes.pulse import start_pulse

start_pulse("the actor", float(sys.argv[1]), Path(sys.argv[2]), leads_group={leads_group})
{work}
"""
IDLE = "print('begins', flush=True); time.sleep(1000)"
BLOCKED = "print('begins', flush=True); ctypes.PyDLL(None).sleep(1000)"
"""A call that waits, and keeps Python's lock."""
BUSY = """
print('begins', flush=True)
power, seconds = 1 << 18, 0.0
while seconds < 3 * float(sys.argv[1]):  # until one call has kept Python's lock for as long
    power, began = power * 3 // 2, time.monotonic()
    pow(3, power)
    seconds = time.monotonic() - began
print('ends', flush=True)
"""
FAMILY = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, sys.argv[4].encode())  # its name
child = subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]])
child.wait()
"""
STOPPED_CHILD = """
child = subprocess.Popen(["sleep", "1000"])
print('begins', flush=True)
os.kill(child.pid, 19)
print(child.wait(), flush=True)
"""


@contextmanager
def actor(folder: Path, work: str, *, leads_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process with a companion, which has said that it begins."""
    code = ACTOR.format(work=work, leads_group=leads_group)
    command = [sys.executable, "-c", code, str(HEARTBEAT_S), str(folder / NAME)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            yield process
        finally:
            process.kill()


def companion_of(process: subprocess.Popen[str]) -> psutil.Process:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            if "companion.py" in " ".join(child.cmdline()):
                return child
    raise AssertionError("no companion was started")


def test_a_stopped_process_is_killed_and_its_companion_ends(tmp_path: Path) -> None:
    log = KilledLog(tmp_path)
    with actor(tmp_path, IDLE) as process:
        companion = companion_of(process)
        process.send_signal(signal.SIGSTOP)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        companion.wait(TIMEOUT_S)
    (line,) = log.news()
    assert f"the actor (process {process.pid}) did not answer for 1 s on" in line
    assert log.news() == []


def test_a_process_that_waits_with_the_lock_of_python_is_killed(tmp_path: Path) -> None:
    with actor(tmp_path, BLOCKED) as process:
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_stopped_child_is_killed_and_its_parent_is_told(tmp_path: Path) -> None:
    log = KilledLog(tmp_path)
    with actor(tmp_path, STOPPED_CHILD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "-9\n"
        assert process.wait(TIMEOUT_S) == 0
    (line,) = log.news()
    assert "(sleep) was stopped for 1 s" in line
    assert "of the actor" in line


def test_a_call_that_computes_with_the_lock_of_python_is_no_reason(tmp_path: Path) -> None:
    with actor(tmp_path, BUSY) as process:
        assert process.communicate(timeout=TIMEOUT_S) == ("ends\n", None)
    assert process.returncode == 0


def hang_another(folder: Path) -> None:
    """Returns when another process was stopped and killed, so that others had the time for it too."""
    with actor(folder, IDLE) as process:
        process.send_signal(signal.SIGSTOP)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL


@contextmanager
def family(folder: Path, name: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process of this name, and an actor that it has started; no signal to the one reaches the other's companion."""
    code = ACTOR.format(work=IDLE, leads_group=True)
    command = [sys.executable, "-c", FAMILY, str(HEARTBEAT_S), str(folder / NAME), code, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begins\n"
        (child,) = psutil.Process(parent.pid).children()
        try:
            yield parent, child
        finally:
            child.kill()
            parent.kill()


def test_who_stops_the_whole_run_and_continues_it_finds_it_alive(tmp_path: Path) -> None:
    """As Ctrl-Z does."""
    with family(tmp_path, "parent") as (parent, child):
        parent.send_signal(signal.SIGSTOP)
        child.suspend()
        for _ in range(2):
            hang_another(tmp_path)
        assert child.status() == psutil.STATUS_STOPPED
        child.resume()
        parent.send_signal(signal.SIGCONT)
        hang_another(tmp_path)
        assert child.status() == psutil.STATUS_SLEEPING


def test_a_stopped_raylet_is_killed_by_what_it_has_started(tmp_path: Path) -> None:
    log = KilledLog(tmp_path)
    with family(tmp_path, "raylet") as (raylet, child):
        raylet.send_signal(signal.SIGSTOP)
        assert raylet.wait(TIMEOUT_S) == -signal.SIGKILL
        (line,) = log.news()
        assert f"process {raylet.pid} of Ray (raylet) was stopped for 1 s" in line
        assert child.is_running()


def test_all_that_a_process_has_started_ends_with_it_if_it_leads_a_group(tmp_path: Path) -> None:
    """And a companion that was killed is replaced."""
    work = "child = subprocess.Popen(['sleep', '1000']); " + IDLE
    with actor(tmp_path, work, leads_group=True) as process:
        first = companion_of(process)
        first.kill()
        first.wait(TIMEOUT_S)
        companion = companion_of(process)
        children = psutil.Process(process.pid).children()
        assert companion in children
        process.kill()
        _, alive = psutil.wait_procs(children, TIMEOUT_S)
    assert alive == []
