"""A small process beside each actor that kills it when it hangs, so that a hung process becomes a dead one.

    actor --beats--> companion     looks at the actor, at all below it, and at the raylet above it

An actor hangs when no beat came and it did nothing either: it was stopped, or it waits with Python's lock held. One
that computes, compiles, reads a disk, or waits for a core of a loaded machine does something. Time is counted in the
companion's own ticks and never by the clock, because what delays the actor from outside delays the companion too: a
machine that sleeps, a container that is frozen, Ctrl-Z.

`python -I -S companion.py ACTOR HEARTBEAT_S LEADS_GROUP NAME LOG`. Beats come on standard input, which ends with the
actor. This is a script of the standard library alone, so that it starts at once and stays small.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence

TICKS = 8
"""Looks in one heartbeat_s."""
MAX_BUSY_TICKS = 2
"""How often in TICKS looks a thread of a hung actor may be seen at work. Ray has threads that never need Python."""
MAX_CPU_SHARE = 0.05
"""Share of one core that those threads may use."""
GONE = (FileNotFoundError, ProcessLookupError)
"""What reading /proc raises when a process or a thread has ended meanwhile."""


class Status:
    """What /proc/PID/stat says of a process, or of a thread."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        self.state = fields[0]
        """R runs or wants to, D waits for a disk, S sleeps, T is stopped, t is stopped by a debugger."""
        self.parent = int(fields[1])
        self.terminal = int(fields[4])
        """0 is none."""
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started = fields[19]
        """Tells apart processes that had the same id."""


Look = tuple[bool, float]
"""Whether any thread was at work, and the seconds of CPU so far."""


def is_hung(looks: Sequence[Look], heartbeat_s: float) -> bool:
    """Whether an actor hangs that sent no beat since before the first look. Only the last TICKS looks count."""
    last = looks[-TICKS:]
    if len(last) < TICKS:
        return False
    num_busy = sum(is_busy for is_busy, _ in last)
    return num_busy <= MAX_BUSY_TICKS and last[-1][1] - last[0][1] <= MAX_CPU_SHARE * heartbeat_s


def is_at_work(states: Sequence[str]) -> bool:
    """Whether the process with threads in these states does something, or is in the hands of a debugger."""
    return any(state in "RDt" for state in states)


def is_left_stopped(process: Status, parent: Status, terminal: int) -> bool:
    """Whether a process is stopped that nobody will continue.

    If its parent is stopped too, somebody has stopped the whole run (Ctrl-Z). With a terminal of its own, other than
    the actor's, it is a job of a shell.
    """
    return process.state == "T" and parent.state != "T" and process.terminal in (0, terminal)


def main() -> None:
    actor, heartbeat_s, leads_group, name, log = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        _Watch(int(actor), float(heartbeat_s), name, log).run()
    finally:
        if int(leads_group):
            os.killpg(int(actor), signal.SIGKILL)  # this process too


class _Watch:
    def __init__(self, actor: int, heartbeat_s: float, name: str, log: str) -> None:
        self._actor = actor
        self._heartbeat_s = heartbeat_s
        self._name = name
        self._log = log
        self._looks: list[Look] = []
        self._stopped: dict[tuple[int, str], int] = {}
        """Process, with its start -> number of looks in a row in which it was stopped."""

    def run(self) -> None:
        """Returns when the actor has ended."""
        os.set_blocking(0, False)
        poll = select.poll()
        poll.register(0, 0)  # wakes for the end alone: each turn is one tick
        while not poll.poll(1000 * self._heartbeat_s / TICKS) and os.getppid() == self._actor:
            with contextlib.suppress(*GONE):
                actor = _status(self._actor)
                above = _status(actor.parent)
                self._look_at_actor(actor, above)
                self._look_at_stopped(actor, above)

    def _look_at_actor(self, actor: Status, above: Status) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(0, 4096)
            self._looks.clear()
            return
        if actor.state == above.state == "T":  # by somebody who has stopped the whole run
            self._looks.clear()
            return
        self._looks = [*self._looks[1 - TICKS :], (is_at_work(_thread_states(self._actor)), actor.cpu_s)]
        if is_hung(self._looks, self._heartbeat_s):
            self._looks.clear()
            self._kill(self._actor, f"{self._name} (process {self._actor}) did not answer")

    def _look_at_stopped(self, actor: Status, above: Status) -> None:
        """What the actor has started, and the raylet that has started the actor."""
        found = [(*each, f"of {self._name}") for each in _below(self._actor, actor)]
        if above.name == "raylet":
            with contextlib.suppress(*GONE):
                found.append((actor.parent, above, _status(above.parent), "of Ray"))
        before, self._stopped = self._stopped, {}
        for pid, process, parent, whose in found:
            if not is_left_stopped(process, parent, actor.terminal):
                continue
            key = (pid, process.started)
            self._stopped[key] = before.get(key, 0) + 1
            if self._stopped[key] == TICKS:
                self._kill(pid, f"process {pid} {whose} ({process.name}) was stopped")

    def _kill(self, pid: int, what: str) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        place = f"on {os.uname().nodename}"
        line = f"{time.strftime('%H:%M:%S')} {what} for {self._heartbeat_s:g} s {place}, and was killed\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        try:
            with open(self._log, "a") as log:
                log.write(line)
        except OSError as error:
            sys.stderr.write(f"{error}\n")


def _status(pid: int, thread: str | None = None) -> Status:
    with open(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat") as file:
        return Status(file.read())


def _thread_states(pid: int) -> list[str]:
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(*GONE):
            found.append(_status(pid, thread).state)
    return found


def children_of(pid: int) -> list[int]:
    """The processes that the threads of a process have started; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(*GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*GONE), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _below(pid: int, process: Status) -> Iterator[tuple[int, Status, Status]]:
    """Each process that descends from this one, with its parent."""
    for child in children_of(pid):
        with contextlib.suppress(*GONE):
            status = _status(child)
            yield child, status, process
            yield from _below(child, status)


if __name__ == "__main__":
    main()
