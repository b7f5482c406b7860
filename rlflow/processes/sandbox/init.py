"""Process 1 of a sandbox: starts the program under its limits, collects orphans, says how the program ended."""

import base64
import os
import resource
import signal

from rlflow.processes.sandbox import linux, namespaces, seccomp
from rlflow.processes.sandbox.protocol import ProgramRequest

MAX_OPEN_FILES = 64
"""Each may be a socket that holds 200 KB."""
MAX_WAITING_SIGNALS = 128
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All that a program sees, HOME and TMPDIR apart. One thread for numpy, as each thread counts as a process."""


def run_init(request: ProgramRequest, pipe: int, folder: str | None) -> None:
    """Start the program and wait for it; does not return.

    folder: the program's own folder, if it has no file system of its own.
    """
    # Process 1 is deaf to signals from within that it has no handler for, and Python has one for this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        _become_program(request, pipe, folder)
    while True:
        ended, status = os.wait()
        if ended == program:
            os.write(pipe, f"X{status}\n".encode())
            os._exit(0)


def _become_program(request: ProgramRequest, pipe: int, folder: str | None) -> None:
    started = False
    try:
        linux.prctl("NO_NEW_PRIVS", linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.die_with_parent()
        # A huge page of which all but a small part is unmapped stays whole, and only the part would be counted.
        linux.prctl("THP_DISABLE", linux.PR_SET_THP_DISABLE, 1)
        if folder is None:
            os.setsid()
            namespaces.become_nobody()
        home = folder or namespaces.HOME
        os.chdir(home)
        for name, content in request["files"].items():
            if parent := os.path.dirname(name):
                os.makedirs(parent, exist_ok=True)
            with open(name, "wb") as file:
                file.write(base64.b64decode(content))
        # The program gets its input, its output, and `pipe`, which closes when it starts; no other descriptor.
        link = request["link"]
        os.dup2(linux.memory_file(base64.b64decode(request["stdin"])) if link is None else link, 0)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 2**16)
        if folder is not None:
            if os.geteuid() == 0:
                _drop_capabilities()
            readable = [path for path in request["readable"] if not os.path.islink(path)]  # anyone may follow a link
            linux.restrict_files(readable, [folder], [f"/dev/{name}" for name in namespaces.DEVICES])
        _limit(request, has_namespace=folder is None)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # an interpreter ignores them, which its children would inherit
            signal.signal(number, signal.SIG_DFL)
        seccomp.install(alone=folder is not None)
        environment = {**ENVIRONMENT, "HOME": home, "TMPDIR": home}
        os.write(pipe, b"R\n")
        started = True
        os.execvpe(request["command"][0], request["command"], environment)
    except BaseException as error:
        os.write(pipe, f"{'F' if started else 'E'}{type(error).__name__}: {error}".splitlines()[0].encode() + b"\n")
    finally:
        os._exit(127)


def _drop_capabilities() -> None:
    """Without this a program of root's could do what only root may."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):  # exec gives root the bounding set; Landlock guards what root owns
        linux.prctl("CAPBSET_DROP", linux.PR_CAPBSET_DROP, capability)


def _limit(request: ProgramRequest, *, has_namespace: bool) -> None:
    cpu, megabyte = request["cpu_seconds"], 2**20
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (request["memory_mb"] * megabyte,) * 2,
        resource.RLIMIT_FSIZE: (request["file_mb"] * megabyte,) * 2,
        resource.RLIMIT_NOFILE: (MAX_OPEN_FILES,) * 2,
        resource.RLIMIT_SIGPENDING: (MAX_WAITING_SIGNALS,) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    if has_namespace:
        # Counted by user and namespace; supervisor and init may be of the same user.
        limits[resource.RLIMIT_NPROC] = (request["processes"] + 2,) * 2
    for number, values in limits.items():
        resource.setrlimit(number, values)
