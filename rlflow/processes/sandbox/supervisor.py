"""The process that watches over a sandboxed program; `rlflow.processes.sandbox.run` starts one for each.

    caller --socket--> supervisor --pipe-- init --> program

The supervisor waits for the program, its limit, or the end of the caller. Then it kills what is left, waits until
nothing is, and answers. It is the reaper of all that is orphaned below it, so that nothing can leave its sight.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time

from rlflow.processes.sandbox import linux, namespaces, protocol
from rlflow.processes.sandbox.init import run_init
from rlflow.processes.sandbox.protocol import BUBBLEWRAP, FILTERS, NAMESPACES, ProgramReport, ProgramRequest
from rlflow.runtime.trees import remove_tree

SET_UP_SECONDS = 30.0


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
        return ProgramReport(failure=str(error), status=None, is_timed_out=False, seconds=0.0)
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
            is_timed_out = self._wait(ours)
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
            failure = said.get("E") or (late if is_timed_out else "it ended before it could start the program")
        status = int(said["X"]) if "X" in said and not failure else None
        return ProgramReport(failure=failure, status=status, is_timed_out=is_timed_out and not failure, seconds=seconds)

    def _wait(self, pipe: int) -> bool:
        """Wait until the program ended, was over its limit (then True), or nobody waits for it any more."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        deadline = time.monotonic() + SET_UP_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
            if self._connection.fileno() in ready:
                return False
            if pipe in ready:
                part = os.read(pipe, 4096)
                self._said += part
                letters = {line[:1] for line in self._said.splitlines()}
                if not part or letters & {b"X", b"E", b"F"}:
                    return False
                if not self._started_at and b"R" in letters:
                    self._started_at = time.monotonic()
                    deadline = self._started_at + self._request["seconds"]
        return True


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
