"""The parent of a process that runs other people's code, forked before any of that code is loaded.

    runner -> supervisor -> worker -> whatever the worker starts

The supervisor kills the worker when the runner is gone or closes the life pipe. When the worker has ended, for whatever
reason, it kills everything that the worker started, also what left the process group or became an orphan, and ends the
way the worker did. It passes on what they print, up to a bound.

`python -m rlflow.processes.supervisor SOCKET_FD LIFE_FD MODULE MAX_MEMORY_BYTES`; the worker is `processes.host`.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence

from rlflow.processes.sandbox import linux
from rlflow.runtime import scratch

MAX_OUTPUT_BYTES = 16 << 20
"""Standard output and error of one worker together. The rest is dropped: what is printed ends up in a log on disk."""
MAX_TERMINAL_BYTES = 64 << 10
"""The same bound if standard error is a terminal, which a person reads; in a run it is a log of Ray's."""
OUTPUT_TIMEOUT_S = 2.0
_STANDARD_ERROR = 2


def supervise(life_fd: int, worker_fds: Sequence[int]) -> None:
    """Fork; only the worker comes back, with standard output and error led through the supervisor.

    `worker_fds` are for the worker and are not inherited by what it executes. Standard output becomes standard error.
    """
    # As inherited from a runner, SIGCHLD may be ignored, which leaves nothing to wait for, and signals may be blocked,
    # which they would stay in all that the worker starts.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    linux.prctl("CHILD_SUBREAPER", linux.PR_SET_CHILD_SUBREAPER, 1)
    output_read, output_write = os.pipe()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become_worker(supervisor, output_write, worker_fds)
        for descriptor in (life_fd, output_read, output_write):
            os.close(descriptor)
        return
    for descriptor in (*worker_fds, output_write):
        os.close(descriptor)
    scratch.hold()  # for as long as anything that the worker started may write there
    with contextlib.suppress(ProcessLookupError):  # the worker does the same; after this line the group exists
        os.setpgid(worker, worker)

    def kill_at_end_of_life() -> None:
        os.read(life_fd, 1)
        _kill_group(worker)

    threading.Thread(target=kill_at_end_of_life, daemon=True).start()
    output = threading.Thread(target=_pass_on, args=(output_read,), daemon=True)
    output.start()
    status = _wait_for_all(worker)
    output.join(OUTPUT_TIMEOUT_S)
    # End with the exit code, or by the signal (negative), that ended the worker.
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    os._exit(code)


def _become_worker(supervisor: int, output_fd: int, worker_fds: Sequence[int]) -> None:
    os.setpgid(0, 0)
    linux.die_with_parent()
    if os.getppid() != supervisor:  # it ended before the line above
        os._exit(1)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, _STANDARD_ERROR)
    for descriptor in worker_fds:
        os.set_inheritable(descriptor, False)
    # When memory runs out, the kernel ends this process rather than a model's.
    with contextlib.suppress(FileNotFoundError, PermissionError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _kill_group(worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)


def _wait_for_all(worker: int) -> int:
    """The worker's status, once it and all that descends from it have ended.

    A subreaper is given the orphans of all its descendants, so every process that is left turns up among its children.
    """
    pid, status = os.wait()
    while pid != worker:
        pid, status = os.wait()
    _kill_group(worker)
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for _ in children:
            os.wait()
    return status


def _children() -> list[int]:
    found = []
    own = str(os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(entry))
    return found


def _pass_on(output_fd: int) -> None:
    left = MAX_TERMINAL_BYTES if os.isatty(_STANDARD_ERROR) else MAX_OUTPUT_BYTES
    while part := os.read(output_fd, 1 << 16):
        if left > 0:
            left -= len(part)
            note = b"" if left > 0 else b"\n[rlflow: what this process prints from here on is dropped]\n"
            with contextlib.suppress(OSError), open(_STANDARD_ERROR, "wb", closefd=False) as error:
                error.write(part + note)


if __name__ == "__main__":
    supervise(int(sys.argv[2]), [int(sys.argv[1])])
    # Imported after the fork, so that the supervisor stays small.
    from rlflow.processes.host import serve

    serve(int(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
