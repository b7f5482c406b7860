"""Running programs that a model wrote.

    result = await run("print(1 + 1)", limits=SandboxLimits(seconds=5))
    result.outcome, result.stdout  ->  Outcome.EXITED, "2\\n"

Three methods; each program gets the first that works on this machine, and a ConfigError says why none does.

- *bubblewrap* (an ordinary user who has `bwrap` 0.7 or later) and *namespaces* (root, or any user who may make user
  namespaces) cover the same: process, IPC, network, mount and user namespaces, so that the program sees no other
  process, and all that it started is dead when it ends, detached or not; a file system in memory with nothing but /usr,
  the libraries, this Python and its packages, read-only, and an empty /sandbox (working directory, HOME and TMPDIR) and
  /tmp, gone afterwards; no /proc. Root's programs run as nobody. `file_mb` bounds all files of /sandbox together, and
  those of /tmp; `processes` all processes and threads.
- *filters* (containers that refuse namespaces; Linux 6.2 or later, x86_64 or aarch64): seccomp and Landlock. One
  process, with threads. No signals to others. Files outside its own folder and the paths above can be neither read nor
  changed, though the program can find out whether one exists. `chmod` and the like seem to succeed and do nothing.
  `file_mb` bounds each file and nothing their number, `processes` has no effect.

All methods: limits on wall-clock time, on CPU time and address space of each process, on the memory that all of them
hold together, on open files and output; no sockets but connected pairs; no core files, no new privileges, no inherited
descriptor, none of the caller's environment variables; first to go when the machine runs out of memory. The caller's
end, however sudden, is the program's.

Memory that an address space does not show is refused (`seccomp`): memfds, shared anonymous mappings, System V's and
POSIX' queues, larger pipes and sockets, and more of the kind. One process therefore stays below `memory_mb` plus the
files in memory. Several together may go above it for some hundredths of a second, until the next look at them.

Not covered: faults of the kernel; processor caches and timing; what is readable in this Python's own folders (so keep
no secrets in a virtual environment). Against people rather than a model that games its reward, use a virtual machine.
"""

import asyncio
import base64
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from rlflow.errors import ConfigError, SandboxError
from rlflow.processes.sandbox.protocol import (
    BUBBLEWRAP,
    FILTERS,
    MEMORY,
    NAMESPACES,
    TIME,
    ProgramReport,
    ProgramRequest,
    frame_of,
    interpreter_arguments,
)
from rlflow.runtime import scratch
from rlflow.runtime.trees import remove_tree

ANSWER_SECONDS = 180.0
"""Beyond the program's own limit: set-up, the end of all its processes, the removal of its files."""
LINGER_SECONDS = 2.0
"""What a program that has ended may take until its result is there."""
PROGRAM_FILE = "program.py"
TRIAL_SECONDS = 60.0
"""The limit of a program that does nothing, on a machine that may be very busy."""
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 10.0
    """Wall-clock, from its start; all it started is killed then."""
    cpu_seconds: int = 10
    """The limit of each process, its threads together."""
    memory_mb: int = 512
    """Address space of each process, and what all of them hold together; files in memory are apart."""
    file_mb: int = 64
    """What it may write, in each of its two folders; in each file where it has no file system of its own."""
    processes: int = 16
    """At a time, threads included."""
    output_bytes: int = 65536
    """The limit of standard output, and of standard error; more ends the program."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"the limit {name} of a sandbox must be positive; got {value}")


class Outcome(StrEnum):
    """How a program ended."""

    EXITED = "exited"
    """By itself; see `exit_code`."""
    TIMED_OUT = "timed_out"
    """Wall-clock or CPU time."""
    OUT_OF_MEMORY = "out_of_memory"
    """A Python program's MemoryError ended it, or its processes held more than `memory_mb` together."""
    TOO_MUCH_OUTPUT = "too_much_output"
    KILLED = "killed"
    """By a signal, such as that of a segmentation fault."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxResult:
    """What became of a program. Its outputs are cut at the limit; bytes that are not UTF-8 are replaced."""

    outcome: Outcome
    exit_code: int | None
    """-N when signal N ended it; None when it had to be ended."""
    stdout: str
    stderr: str
    seconds: float
    """Wall-clock, without setting up and clearing away."""

    @property
    def is_success(self) -> bool:
        return self.outcome is Outcome.EXITED and self.exit_code == 0


@dataclass(kw_only=True, slots=True, frozen=True)
class _Method:
    name: str
    bwrap: str = ""
    refused: tuple[str, ...] = ()
    """Why the methods before this one do not work here."""


_found: _Method | None = None
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def run(
    program: str | Sequence[str],
    *,
    files: Mapping[str, str | bytes] | None = None,
    stdin: str = "",
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run a program and wait for its end. As many run at a time as there are processor cores; the others wait.

    program: Python source, or a command such as ["python3", "main.py"].
    files: relative path -> content, put into its working directory; Python source can import them.

    Raises:
        SandboxError: it could not be run, through no fault of its own.
        ConfigError: this machine has no way to run it safely.
        ValueError: a path of `files` is absolute or leaves the folder.
    """
    method = await _find_method()
    contents = {name: _checked_content(name, content) for name, content in (files or {}).items()}
    if isinstance(program, str):
        contents[PROGRAM_FILE] = _bytes_of(program)
    command = command_of_python() if isinstance(program, str) else program
    async with _slot():
        return await _run(method, command, contents, stdin, limits or SandboxLimits())


@dataclass(kw_only=True, slots=True, frozen=True)
class Linked:
    """One of two programs, each of which has a socket to the other one as its standard input."""

    command: Sequence[str]
    files: Mapping[str, str]
    limits: SandboxLimits


async def run_linked(first: Linked, second: Linked) -> tuple[SandboxResult, SandboxResult | None]:
    """Run two programs in a sandbox each, until the first one ends; they share the core of one.

    Then the second one is killed and has no result, unless the first one exited with another code than 0: it has
    LINGER_SECONDS to end by itself. Raises as `run` does.
    """
    method = await _find_method()
    async with _slot():
        ends = socket.socketpair()
        tasks = [
            asyncio.create_task(
                _run(
                    method,
                    program.command,
                    {name: _checked_content(name, content) for name, content in program.files.items()},
                    end,
                    program.limits,
                )
            )
            for program, end in zip((first, second), ends, strict=True)
        ]
        try:
            result = await tasks[0]
            if result.exit_code and result.outcome is Outcome.EXITED:
                await asyncio.wait(tasks, timeout=LINGER_SECONDS)
            return result, tasks[1].result() if tasks[1].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                end.close()


def _slot() -> asyncio.Semaphore:
    """One for each processor core."""
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(len(os.sched_getaffinity(0))))


def _checked_content(name: str, content: str | bytes) -> bytes:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a file of a sandbox has a relative path without `..`; got {name!r}")
    return _bytes_of(content) if isinstance(content, str) else content


async def describe() -> str:
    """One line for people: the method that this machine gets, and why not the ones before it.

    Raises:
        ConfigError: no method works here; it says why.
    """
    method = await _find_method()
    return "; ".join([f"sandbox: {method.name}", *method.refused])


def command_of_python() -> list[str]:
    """The interpreter for Python source: with the packages of this environment, without the user's own."""
    return [_executable(), "-s", "-B", PROGRAM_FILE]


def _executable() -> str:
    """This Python, without `..`: a sandbox does not show the folders on the way there."""
    head, dots, rest = sys.executable.rpartition("/../")
    return os.path.join(os.path.realpath(head + dots), rest) if dots else sys.executable


def _candidates() -> list[_Method]:
    """In order of preference. Root does without bubblewrap, which cannot make it another user."""
    candidates = [_Method(name=NAMESPACES), _Method(name=FILTERS)]
    bwrap = shutil.which("bwrap")
    return [_Method(name=BUBBLEWRAP, bwrap=bwrap), *candidates] if bwrap and os.geteuid() != 0 else candidates


async def _find_method() -> _Method:
    """The first that works; tried once in a process."""
    global _found
    if _found is not None:
        return _found
    if sys.platform != "linux":
        raise ConfigError(f"programs of a model can be run on Linux only; this is {sys.platform}")
    refused: list[str] = []
    trial = {PROGRAM_FILE: b"print(1)"}
    for candidate in _candidates():
        try:
            result = await _run(candidate, command_of_python(), trial, "", SandboxLimits(seconds=TRIAL_SECONDS))
        except SandboxError as error:
            refused.append(f"{candidate.name}: {error}")
            continue
        if result.is_success and result.stdout == "1\n":
            _found = _Method(name=candidate.name, bwrap=candidate.bwrap, refused=tuple(refused))
            return _found
        refused.append(f"{candidate.name}: a trial ended with {result}")
    raise ConfigError(
        "this machine has no way to run a model's programs safely; install bubblewrap, or run where user namespaces or "
        f"Landlock (Linux 6.2) are allowed. Tried: {'; '.join(refused)}"
    )


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # Python says what is wrong with such source


def readable_paths() -> list[str]:
    """What a program may read: the system, this Python, and the packages beside it. None is below another one.

    A symbolic link on the way to one of them stays a link, and shows nothing else of the folder that it points to.
    """
    paths = [path for path in _SYSTEM if os.path.exists(path)]
    links, python = _follow(sys.executable)
    wanted = [os.path.dirname(os.path.dirname(python))]
    for prefix in (sys.base_prefix, sys.prefix):
        more, folder = _follow(prefix)
        links += more
        wanted.append(folder)
    for path in (*wanted, *links):
        if not any(PurePosixPath(path).is_relative_to(held) for held in paths):
            paths = [held for held in paths if not PurePosixPath(held).is_relative_to(path)] + [path]
    return paths


def _follow(path: str) -> tuple[list[str], str]:
    """The symbolic links that lead from an absolute path to what it names, and that."""
    links: list[str] = []
    place, rest = "/", list(PurePosixPath(path).parts[1:])
    while rest:
        step = os.path.normpath(os.path.join(place, rest.pop(0)))
        if os.path.islink(step):
            links.append(step)
            target = PurePosixPath(os.readlink(step))
            place, rest = ("/" if target.is_absolute() else place), [*target.parts[target.is_absolute() :], *rest]
        else:
            place = step
    return links, place


async def _run(
    method: _Method,
    command: Sequence[str],
    files: Mapping[str, bytes],
    stdin: str | socket.socket,
    limits: SandboxLimits,
) -> SandboxResult:
    link = None if isinstance(stdin, str) else stdin
    request = ProgramRequest(
        method=method.name,
        bwrap=method.bwrap,
        package=str(Path(__file__).resolve().parent.parent.parent.parent),
        readable=readable_paths(),
        folder=f"{scratch.folder()}/sandbox-{secrets.token_hex(8)}",
        command=list(command),
        files={name: base64.b64encode(content).decode() for name, content in files.items()},
        stdin=base64.b64encode(_bytes_of(stdin)).decode() if isinstance(stdin, str) else "",
        link=link.fileno() if link else None,
        seconds=limits.seconds,
        cpu_seconds=limits.cpu_seconds,
        memory_mb=limits.memory_mb,
        file_mb=limits.file_mb,
        processes=limits.processes,
    )
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            _executable(),
            *interpreter_arguments(request["package"]),
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
            pass_fds=(link.fileno(),) if link else (),
        )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise SandboxError(f"no process could be started for a sandbox: {error}") from error
        raise
    finally:
        theirs.close()
        if link:
            link.close()  # so that its peer notices when the program ends
    try:
        return await _result(request, process, reader, writer, limits)
    finally:
        # The program ends when the socket closes; a caller that was cancelled waits for that too.
        writer.close()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.shield(process.wait())
        except TimeoutError as error:
            process.kill()
            raise SandboxError(f"a sandbox did not end within {ANSWER_SECONDS:g} s") from error
        if os.path.lexists(request["folder"]):  # the supervisor was killed
            await asyncio.to_thread(remove_tree, request["folder"])


async def _result(
    request: ProgramRequest,
    process: asyncio.subprocess.Process,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    limits: SandboxLimits,
) -> SandboxResult:
    async def read(stream: asyncio.StreamReader | None) -> bytes:
        """One byte more than allowed at the most, which ends the program."""
        assert stream is not None
        held = bytearray()
        while part := await stream.read(65536):
            held += part[: limits.output_bytes + 1 - len(held)]
            if len(held) > limits.output_bytes and writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()
        return bytes(held)

    try:
        async with asyncio.timeout(limits.seconds + ANSWER_SECONDS):
            writer.write(frame_of(request))
            await writer.drain()
            outputs = await asyncio.gather(read(process.stdout), read(process.stderr))
            answer = await reader.read()
    except TimeoutError as error:
        raise SandboxError(f"a sandbox gave no answer within {limits.seconds + ANSWER_SECONDS:g} s") from error
    except ConnectionError as error:
        raise SandboxError(f"the process that watches a sandbox died: {error}") from error
    stdout, stderr = [each[: limits.output_bytes].decode(errors="replace") for each in outputs]
    report: ProgramReport | None = json.loads(answer[4:]) if answer else None
    if report is None or report["failure"]:
        failure = report["failure"] if report else "the process that watches it died"
        raise SandboxError(
            f"a program could not be run in its sandbox: {failure}; {stderr.strip()[-500:]}".rstrip("; ")
        )
    status = report["status"]
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if any(len(each) > limits.output_bytes for each in outputs):
        outcome, code = Outcome.TOO_MUCH_OUTPUT, None
    elif report["end"] == TIME or code == -signal.SIGXCPU:
        outcome, code = Outcome.TIMED_OUT, None
    elif report["end"] == MEMORY:
        outcome, code = Outcome.OUT_OF_MEMORY, None
    elif code is None or code < 0:
        outcome = Outcome.KILLED
    elif code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        outcome = Outcome.OUT_OF_MEMORY
    else:
        outcome = Outcome.EXITED
    return SandboxResult(outcome=outcome, exit_code=code, stdout=stdout, stderr=stderr, seconds=report["seconds"])
