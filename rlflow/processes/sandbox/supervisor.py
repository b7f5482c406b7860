"""The process that watches over a sandboxed program; `rlflow.processes.sandbox.run` starts one for each.

    caller --socket--> supervisor --pipe-- init --> program

The supervisor waits for the program, one of its limits, or the end of the caller. Then it kills what is left, waits
until nothing is, and answers. It is the reaper of all that is orphaned below it, so that nothing can leave its sight.
"""

import contextlib
import fcntl
import math
import os
import select
import signal
import socket
import sys
import time

from rlflow.processes.sandbox import linux, namespaces, protocol
from rlflow.processes.sandbox.init import run_init
from rlflow.processes.sandbox.memory import held_bytes
from rlflow.processes.sandbox.protocol import (
    BUBBLEWRAP,
    FILTERS,
    MEMORY,
    NAMESPACES,
    TIME,
    Limit,
    ProgramReport,
    ProgramRequest,
)
from rlflow.runtime.trees import remove_tree

SET_UP_SECONDS = 30.0
LOOK_SECONDS = 0.01
"""Between two looks at how much memory is held; twice as long as a look when that is more."""


def main() -> None:
    """Without arguments the supervisor; with two descriptors (request, pipe) the init within bubblewrap."""
    if len(sys.argv) > 2:
        descriptor, pipe = int(sys.argv[2]), int(sys.argv[3])
        os.set_inheritable(pipe, False)
        request = protocol.receive(descriptor)
        os.close(descriptor)
        run_init(request, pipe, None)
    with socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)) as connection:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        with contextlib.suppress(EOFError, BrokenPipeError):  # the caller has gone, and wants no answer
            request = protocol.receive(connection.fileno())
            connection.sendall(protocol.frame_of(_supervise(request, connection)))


def _supervise(request: ProgramRequest, connection: socket.socket) -> ProgramReport:
    linux.prctl("CHILD_SUBREAPER", linux.PR_SET_CHILD_SUBREAPER, 1)
    folder = request["folder"] if request["method"] == FILTERS else None
    try:
        if folder is not None:
            os.mkdir(folder, 0o700)
        if request["method"] == NAMESPACES:
            namespaces.leave()
        return _Watch(request, connection).run(folder)
    except OSError as error:
        return ProgramReport(failure=str(error), status=None, end=None, seconds=0.0)
    finally:
        if folder is not None:
            remove_tree(folder)


class _Watch:
    """One program, from its start to the end of all that it started."""

    def __init__(self, request: ProgramRequest, connection: socket.socket) -> None:
        self._request = request
        self._connection = connection
        self._said = b""
        """What init said so far, in lines: R the program starts, X with its status, F why it could not start after
        all, E an error of init. After R an error of init is the program's doing, and says nothing about the set-up."""
        self._started_at = 0.0

    def run(self, folder: str | None) -> ProgramReport:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            self._connection.close()
            _become_init(self._request, theirs, folder)
        os.close(theirs)
        with contextlib.suppress(OSError):  # the child does the same; either may be first
            os.setpgid(child, child)
        try:
            end = self._wait(ours, child)
        finally:
            seconds = time.monotonic() - self._started_at if self._started_at else 0.0
            # Kill everything below this process, and go on when it is gone. The group may be gone before its leader.
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        with open(ours, "rb") as rest:
            self._said += rest.read()
        said = {line[:1]: line[1:] for line in self._said.decode(errors="replace").splitlines()}
        failure = said.get("F", "")
        if "R" not in said:
            late = f"it took longer than {SET_UP_SECONDS:g} s"
            failure = said.get("E") or (late if end == TIME else "it ended before it could start the program")
        status = int(said["X"]) if "X" in said and not failure else None
        return ProgramReport(failure=failure, status=status, end=None if failure else end, seconds=seconds)

    def _wait(self, pipe: int, child: int) -> Limit | None:
        """Wait until the program ended, was over a limit, or nobody waits for it any more."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        deadline = time.monotonic() + SET_UP_SECONDS
        allowed, pause = self._request["memory_mb"] * 2**20, math.inf
        while (left := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(min(left, pause) * 1000)]
            if self._connection.fileno() in ready:
                return None
            if pipe in ready:
                part = os.read(pipe, 4096)
                self._said += part
                letters = {line[:1] for line in self._said.splitlines()}
                if not part or letters & {b"X", b"E", b"F"}:
                    return None
                if not self._started_at and b"R" in letters:
                    self._started_at = time.monotonic()
                    deadline, pause = self._started_at + self._request["seconds"], LOOK_SECONDS
            if self._started_at:
                looked_at = time.monotonic()
                if held_bytes(child, 2 if self._request["method"] == BUBBLEWRAP else 1, allowed) > allowed:
                    return MEMORY
                pause = max(LOOK_SECONDS, 2 * (time.monotonic() - looked_at))
        return TIME


def _become_init(request: ProgramRequest, pipe: int, folder: str | None) -> None:
    try:
        os.setpgid(0, 0)
        linux.die_with_parent()
        with contextlib.suppress(OSError):  # hidden in some containers; it only says what to kill first
            namespaces.write("/proc/self/oom_score_adj", "1000")
        if request["method"] == BUBBLEWRAP:
            os.set_inheritable(pipe, True)
            words = [str(linux.memory_file(protocol.frame_of(request))), str(pipe)]
            inner = [sys.executable, *protocol.interpreter_arguments(request["package"], words)]
            bwrap, package = request["bwrap"], os.path.join(request["package"], "rlflow")
            os.execv(
                bwrap,
                namespaces.bubblewrap_command(bwrap, request["readable"], package, request["file_mb"], inner),
            )
        if request["method"] == NAMESPACES:
            namespaces.build_root(request["readable"], request["file_mb"])
        run_init(request, pipe, folder)
    except BaseException as error:
        os.write(pipe, f"E{type(error).__name__}: {error}".splitlines()[0].encode())
    finally:
        os._exit(1)
