"""Programs that a model may write, for real: what becomes of them, of what they started, and of what they attacked."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.envs.rewards.code import code, last_program
from rlflow.errors import ConfigError, SandboxError
from rlflow.processes.sandbox import namespaces
from rlflow.processes.sandbox import run as sandbox
from rlflow.processes.sandbox.protocol import BUBBLEWRAP, FILTERS, NAMESPACES
from rlflow.processes.sandbox.run import (
    Outcome,
    SandboxLimits,
    SandboxResult,
    command_of_python,
    describe,
    readable_paths,
    run,
)
from rlflow.processes.sandbox.seccomp import program_of
from rlflow.runtime import scratch

QUICK = SandboxLimits(seconds=0.7, cpu_seconds=5, memory_mb=256, file_mb=8, processes=8, output_bytes=5000)
ROOMY = SandboxLimits(seconds=20, memory_mb=256)

TRIED: dict[str, sandbox._Method | str] = {}


@pytest.fixture(params=[NAMESPACES, BUBBLEWRAP, FILTERS])
async def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each method in turn, where this machine allows it."""
    if request.param not in TRIED:
        TRIED[request.param] = await try_method(request.param)
    tried = TRIED[request.param]
    if isinstance(tried, str):
        pytest.skip(tried)
    monkeypatch.setattr(sandbox, "_found", tried)
    return request.param


async def try_method(name: str) -> sandbox._Method | str:
    """The method, or why this machine does not have it."""
    candidates = [each for each in sandbox._candidates() if each.name == name]
    if not candidates:
        return f"no {name} for this user"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_found", None)
        patch.setattr(sandbox, "_candidates", lambda: candidates)
        try:
            assert await describe() == f"sandbox: {name}"
        except ConfigError as error:
            return str(error)
    return candidates[0]


async def attack(source: str, limits: SandboxLimits = QUICK) -> SandboxResult:
    """Run it, and check that nothing of it is left."""
    token = secrets.token_hex(8)
    files = {"program.py": f"import os; print(os.getcwd(), flush=True)\n{source}"}
    result = await run([*command_of_python(), token], files=files, limits=limits)
    assert processes_of(token) == []
    folder = result.stdout.splitlines()[0]
    assert not Path(folder).exists(), "its folder is still there"
    return result


def processes_of(token: str) -> list[int]:
    """Processes, of any namespace below this one, that have a word on their command line."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and token in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_program_and_its_files(method: str) -> None:
    source = "import helper, sys; print(helper.double(int(input()))); print('odd', file=sys.stderr); sys.exit(3)"
    helper = "def double(number): return 2 * number"
    result = await run(source, files={"helper.py": helper}, stdin="21\n", limits=ROOMY)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 3)
    assert (result.stdout, result.stderr) == ("42\n", "odd\n")
    assert not result.is_success


async def test_packages_of_this_environment_can_be_imported(method: str) -> None:
    result = await run("import numpy; print(numpy.arange(3).sum())", limits=SandboxLimits(seconds=20))
    assert result.stdout == "3\n", result.stderr


WRITER = "import os; os.write(0, b'5'); print(os.read(0, 9).decode(), flush=True); os._exit({code})"
ECHO = "import os, time; os.write(0, b'got ' + os.read(0, 9)); print('sent', flush=True); "
ECHO += "os.read(0, 9); time.sleep({rest})"


@pytest.mark.parametrize(("code", "rest", "said"), [(0, 900, None), (3, 0, "sent\n")])
async def test_two_programs_with_a_socket_between_them(
    method: str, code: int, rest: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "LINGER_SECONDS", 60.0)
    programs = [
        sandbox.Linked(command=[sys.executable, "-c", source.format(code=code, rest=rest)], files={}, limits=ROOMY)
        for source in (WRITER, ECHO)
    ]
    first, second = await sandbox.run_linked(*programs)
    assert (first.exit_code, first.stdout) == (code, "got 5\n")
    assert (second and second.stdout) == said


async def test_a_command(method: str) -> None:
    result = await run(["cat", "folder/words"], files={"folder/words": b"abc"}, limits=ROOMY)
    assert result.is_success
    assert result.stdout == "abc"


async def test_a_command_that_does_not_exist_is_no_result(method: str) -> None:
    with pytest.raises(SandboxError, match="could not be run in its sandbox: FileNotFoundError"):
        await run(["no-such-program"])


async def test_bytes_that_are_no_text(method: str) -> None:
    result = await run(r"import sys; sys.stdout.buffer.write(b'a\xff\xfeb')", limits=ROOMY)
    assert result.stdout == "a\ufffd\ufffdb"


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        pytest.param("import time; time.sleep(1000)", Outcome.TIMED_OUT, id="hang"),
        pytest.param("while True: pass", Outcome.TIMED_OUT, id="busy"),
        pytest.param("import ctypes; ctypes.string_at(0)", Outcome.KILLED, id="crash"),
        pytest.param(
            "import signal, os\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass",
            Outcome.TIMED_OUT,
            id="deaf",
        ),
        pytest.param("while True: print('x' * 1000)", Outcome.TOO_MUCH_OUTPUT, id="endless_output"),
        pytest.param("x = []\nwhile True: x.append(bytearray(10**7))", Outcome.OUT_OF_MEMORY, id="memory_bomb"),
        pytest.param(
            "while True:\n    try: os.fork()\n    except OSError: pass", Outcome.TIMED_OUT, id="fork_bomb_that_goes_on"
        ),
        pytest.param("while True: os.fork()", None, id="fork_bomb"),
        pytest.param(
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
            Outcome.TIMED_OUT,
            id="thread_bomb",
        ),
        pytest.param("while True: os.mkdir('a'); os.chdir('a')", None, id="endless_folders"),
        pytest.param(
            "open('locked', 'w'); os.mkdir('d'); os.chmod('d', 0); os.chmod('.', 0)", Outcome.EXITED, id="modes"
        ),
        pytest.param("os.kill(os.getpid(), 9)", Outcome.KILLED, id="suicide"),
        pytest.param("os._exit(0)", Outcome.EXITED, id="exit"),
    ],
)
@pytest.mark.slow
async def test_what_becomes_of_a_program(method: str, source: str, outcome: Outcome | None) -> None:
    is_endless = outcome in (None, Outcome.TIMED_OUT)
    result = await attack(source, QUICK if is_endless else replace(QUICK, seconds=60))
    assert result.outcome is outcome or outcome is None
    assert not result.is_success or source == "os._exit(0)" or "chmod" in source
    assert len(result.stdout) <= QUICK.output_bytes


@pytest.mark.slow
async def test_cpu_time_is_limited_beside_wall_clock_time(method: str) -> None:
    result = await attack("while True: pass", SandboxLimits(seconds=60, cpu_seconds=1))
    assert result.outcome is Outcome.TIMED_OUT
    assert result.seconds < 50


async def test_a_huge_file(method: str) -> None:
    result = await attack("file = open('big', 'wb')\nwhile True: file.write(bytes(10**6))", ROOMY)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 1)
    assert result.stderr.splitlines()[-1] in (
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 27] File too large",
    )


@pytest.mark.slow
async def test_a_child_that_leaves_its_session_does_not_survive(method: str) -> None:
    source = """
import time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
except PermissionError:
    pass
"""
    assert (await attack(source, ROOMY)).is_success


async def test_the_parent_cannot_be_killed(method: str) -> None:
    source = f"""
import signal
for process in (os.getppid(), {os.getpid()}, 1, -1, 0):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            if process:
                os.kill(process, number)
        except OSError:
            pass
print("done")
"""
    result = await attack(source, ROOMY)
    assert result.is_success
    assert result.stdout.splitlines()[1:] == ["done"]


async def test_secrets_of_the_environment_stay_there(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden-7391")
    source = f"""
print(dict(os.environ))
for process in (os.getppid(), {os.getpid()}, 1, "self"):
    try:
        print(open(f"/proc/{{process}}/environ").read())
    except OSError as error:
        print("refused")
"""
    result = await attack(source, ROOMY)
    assert "hidden-7391" not in result.stdout
    assert result.stdout.count("refused") == 4
    names = {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"}
    names |= {f"{name}_NUM_THREADS" for name in ("OMP", "OPENBLAS", "MKL")}
    assert (await run("import os; print(*sorted(os.environ))", limits=ROOMY)).stdout.split() == sorted(names)


async def test_files_outside_cannot_be_read_or_changed(method: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o640)
    source = f"""
import shutil
for path in ({str(victim)!r}, os.__file__, "/usr/bin/env", "/etc/passwd"):
    for action in (os.unlink, lambda path: open(path, "a"), lambda path: os.rename(path, path + "2"),
                   lambda path: os.truncate(path, 0), lambda path: os.symlink("x", os.path.dirname(path) + "/y")):
        try:
            action(path)
            print("did it", path)
        except OSError:
            pass
    try:
        os.chmod(path, 0)
    except OSError:
        pass
for path in ({str(victim)!r}, "/etc/shadow", "/etc/passwd", "/root/.bashrc", "/proc/self/environ"):
    try:
        open(path).close()
        print("saw it", path)
    except OSError:
        pass
"""
    library = Path(os.__file__).stat()
    result = await attack(source, ROOMY)
    assert result.is_success, result.stderr
    assert result.stdout.splitlines()[1:] == []
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode & 0o777 == 0o640
    assert (Path(os.__file__).stat().st_mode, Path(os.__file__).stat().st_mtime) == (library.st_mode, library.st_mtime)


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[list[object]]:
    """Addresses where somebody listens: TCP, a path and an abstract name for connections, and for datagrams."""
    abstract = f"\0rlflow-test-{secrets.token_hex(8)}"
    opened = [socket.create_server(("127.0.0.1", 0))]
    addresses: list[object] = [opened[0].getsockname()]
    for address in (str(tmp_path / "s"), abstract):
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].bind(address)
        opened[-1].listen()
        opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        opened[-1].bind(f"{address}-datagrams")
        addresses += [address, f"{address}-datagrams"]
    yield addresses
    for each in opened:
        each.close()


async def test_there_is_no_network(method: str, listeners: list[object]) -> None:
    source = f"""
import socket
for address in {[*listeners, ("1.1.1.1", 53)]!r}:
    try:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        socket.socket(family).connect(address)
        print("reached", address)
    except OSError:
        pass
    try:
        # One of a pair can be connected to another one instead.
        socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect(address)
        print("reached", address, "with one of a pair")
    except (OSError, TypeError):
        pass
for family in range(1, 46):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("opened a socket of family", family)
    except OSError:
        pass
try:
    socket.getaddrinfo("example.com", 443)
    print("resolved")
except OSError:
    pass
a, b = socket.socketpair()
a.sendall(b"pairs work")
print(b.recv(100).decode())
"""
    result = await attack(source, ROOMY)
    assert result.stdout.splitlines()[1:] == ["pairs work"], result.stderr


async def test_no_privilege_can_be_gained(method: str) -> None:
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
head = ctypes.create_string_buffer((0x20080522).to_bytes(4, "little") + bytes(4))
held = ctypes.create_string_buffer(24)
assert libc.capget(head, held) == 0
print(held.raw[:24] == bytes(24), libc.prctl(39, 0, 0, 0, 0), libc.unshare(0x10000000), libc.syscall(425, 8, 0))
"""
    result = await attack(source, ROOMY)
    assert result.stdout.splitlines()[1:] == ["True 1 -1 -1"], result.stderr


@pytest.mark.slow
async def test_a_cancelled_call_ends_the_program(method: str) -> None:
    token = secrets.token_hex(8)
    files = {"program.py": "import time; time.sleep(1000)"}
    task = asyncio.create_task(run([*command_of_python(), token], files=files, limits=SandboxLimits(seconds=900)))
    await eventually(lambda: processes_of(token) != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_of(token) == []


@pytest.mark.slow
async def test_a_killed_caller_ends_the_program(method: str) -> None:
    token = secrets.token_hex(8)
    caller = f"""
import asyncio, sys
from rlflow.processes.sandbox import run as sandbox
sandbox._found = sandbox._Method(name={method!r}, bwrap={sandbox._candidates()[0].bwrap!r})
files = {{"program.py": "import time; time.sleep(1000)"}}
word = "".join(reversed({token[::-1]!r}))
command = [*sandbox.command_of_python(), word]
asyncio.run(sandbox.run(command, files=files, limits=sandbox.SandboxLimits(seconds=900)))
"""
    process = subprocess.Popen([sys.executable, "-c", caller])
    try:
        await eventually(lambda: processes_of(token) != [])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    await eventually(lambda: processes_of(token) == [])


async def test_no_more_programs_than_cores_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    most = 0

    async def pretend(*_: object) -> None:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.pop()

    monkeypatch.setattr(sandbox, "_found", sandbox._Method(name=FILTERS))
    monkeypatch.setattr(sandbox, "_run", pretend)
    await asyncio.gather(*(run("") for _ in range(200)))
    assert most == len(os.sched_getaffinity(0))


async def test_a_machine_without_a_method_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise SandboxError("not here")

    monkeypatch.setattr(sandbox, "_found", None)
    monkeypatch.setattr(sandbox, "_run", refuse)
    with pytest.raises(ConfigError, match="no way to run a model's programs safely; .*filters: not here"):
        await run("print(1)")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
async def test_files_stay_in_the_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_found", sandbox._Method(name=FILTERS))
    with pytest.raises(ValueError, match="a file of a sandbox has a relative path without"):
        await run("print(1)", files={name: "x"})


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="the limit memory_mb of a sandbox must be positive; got 0"):
        SandboxLimits(memory_mb=0)


def test_what_a_program_may_read_holds_this_python_and_nothing_twice() -> None:
    paths = readable_paths()
    assert "/usr" in paths
    for needed in (os.__file__, os.path.realpath(sys.executable), sys.executable):
        assert any(Path(needed).is_relative_to(path) for path in paths)
    assert not any(Path(one).is_relative_to(other) for one in paths for other in paths if one != other)
    assert not any(Path(secret).is_relative_to(path) for secret in ("/etc/shadow", "/root/.ssh") for path in paths)


@pytest.mark.parametrize("is_relative", [False, True])
async def test_an_interpreter_behind_links(method: str, is_relative: bool, tmp_path: Path) -> None:
    (tmp_path / "projects").mkdir()
    (tmp_path / "work").symlink_to("projects" if is_relative else tmp_path / "projects")
    (tmp_path / "projects" / ".venv").symlink_to(
        os.path.relpath(sys.prefix, tmp_path / "projects") if is_relative else sys.prefix
    )
    python = str(tmp_path / "work" / ".venv" / "bin" / "python")
    assert what_a_program_says_of_its_python(python, python, method, tmp_path) == python


async def test_an_interpreter_with_dots_in_its_path(method: str, tmp_path: Path) -> None:
    command = os.path.relpath(sys.executable, tmp_path)
    found = what_a_program_says_of_its_python(command, f"{tmp_path}/{command}", method, tmp_path)
    assert found == sys.executable


def what_a_program_says_of_its_python(command: str, python: str, method: str, folder: Path) -> str:
    caller = f"""
import asyncio, sys
from rlflow.processes.sandbox import run as sandbox
assert sys.executable == {python!r}, sys.executable
method = sandbox._Method(name={method!r}, bwrap={sandbox._candidates()[0].bwrap!r})
sandbox._candidates = lambda: [method]
result = asyncio.run(sandbox.run("import sys, numpy; print(sys.executable)"))
print(result.stdout, result.stderr)
"""
    done = subprocess.run(
        [command, "-c", caller],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_line_of_bubblewrap() -> None:
    words = namespaces.bubblewrap_command("/usr/bin/bwrap", ["/usr"], "/opt/site/rlflow", 64, ["python3", "-I"])
    assert words[:6] == ["/usr/bin/bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    assert words[-5:] == ["--chdir", "/sandbox", "--", "python3", "-I"]
    text = " ".join(words)
    assert "--size 67108864 --tmpfs /sandbox --size 67108864 --tmpfs /tmp --ro-bind /usr /usr" in text
    assert "--ro-bind /opt/site/rlflow /opt/site/rlflow --remount-ro / --chdir /sandbox -- python3 -I" in text
    assert "--dev-bind /dev/null /dev/null" in text
    assert "--share-net" not in text and "--proc" not in text


ALLOW, KILL = "allow", "kill"
X86, ARM = 0xC000003E, 0xC00000B7


def verdict(program: bytes, architecture: int, call: int, arguments: Sequence[int]) -> str | int:
    """What the kernel would do, by the rules of classic BPF: "allow", "kill", or the errno."""
    words = [each & (2**64 - 1) for each in (*arguments, *[0] * 6)[:6]]
    data = struct.pack("=IIQ6Q", call, architecture, 0, *words)
    code = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    place, held = 0, 0
    while True:
        operation, if_true, if_false, value = code[place]
        place += 1
        if operation == 0x20:
            held = int.from_bytes(data[value : value + 4], "little")
        elif operation == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value, value & 0xFFFF)
        else:
            is_true = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[operation]
            place += if_true if is_true else if_false


@pytest.mark.parametrize(
    ("machine", "alone_pid", "architecture", "call", "argument", "expected"),
    [
        ("x86_64", 7, X86, 0, 0, ALLOW),  # read
        ("x86_64", 7, 0x40000003, 0, 0, KILL),  # of 32 bits
        ("x86_64", 7, X86, 0x40000000, 0, errno.EPERM),  # x32
        ("x86_64", 7, X86, 41, 2, errno.EPERM),  # socket
        ("x86_64", None, X86, 41, 2, errno.EPERM),
        ("x86_64", None, X86, 41, 40, errno.EPERM),  # socket of AF_VSOCK
        ("x86_64", 7, X86, 42, 3, errno.EPERM),  # connect
        ("x86_64", 7, X86, 53, (1, 0x80801), ALLOW),  # socketpair of streams
        ("x86_64", None, X86, 53, (1, 1), ALLOW),
        ("x86_64", None, X86, 53, (1, 2), errno.EPERM),  # of datagrams
        ("x86_64", None, X86, 53, (1, 5), errno.EPERM),
        ("x86_64", None, X86, 53, (30, 1), errno.EPERM),  # of AF_TIPC
        ("x86_64", None, X86, 9, (0, 4096, 3, 0x22), ALLOW),  # mmap, anonymous and private
        ("x86_64", None, X86, 9, (0, 4096, 3, 0x01), ALLOW),  # a file, shared
        ("x86_64", None, X86, 9, (0, 4096, 3, 0x21), errno.EPERM),  # anonymous and shared
        ("x86_64", 7, X86, 9, (0, 4096, 3, 0x23), errno.EPERM),
        ("x86_64", None, X86, 319, 0, errno.EPERM),  # memfd_create
        ("x86_64", None, X86, 447, 0, errno.EPERM),  # memfd_secret
        ("x86_64", None, X86, 72, (5, 1), ALLOW),  # fcntl(F_GETFD)
        ("x86_64", None, X86, 72, (5, 6), ALLOW),  # fcntl(F_SETLK)
        ("x86_64", None, X86, 72, (5, 1031), errno.EPERM),  # fcntl(F_SETPIPE_SZ)
        ("x86_64", None, X86, 436, (3, 9, 4), ALLOW),  # close_range
        ("x86_64", None, X86, 436, (3, 9, 2), errno.EPERM),
        ("x86_64", None, X86, 157, 41, errno.EPERM),  # prctl(PR_SET_THP_DISABLE)
        ("x86_64", None, X86, 157, 1, ALLOW),
        ("x86_64", None, X86, 56, 0x003D0B00, errno.EPERM),  # clone of a thread with descriptors of its own
        ("x86_64", 7, X86, 57, 0, errno.EPERM),  # fork
        ("x86_64", None, X86, 57, 0, ALLOW),
        ("x86_64", 7, X86, 56, 0x003D0F00, ALLOW),  # clone of a thread
        ("x86_64", 7, X86, 56, 0x01200011, errno.EPERM),  # clone of a process
        ("x86_64", None, X86, 56, 0x01200011, ALLOW),
        ("x86_64", None, X86, 56, 0x10000011, errno.EPERM),  # clone with a user namespace
        ("x86_64", None, X86, 435, 0, errno.ENOSYS),  # clone3
        ("x86_64", None, X86, 425, 0, errno.EPERM),  # io_uring_setup
        ("x86_64", 7, X86, 62, 7, ALLOW),  # kill oneself
        ("x86_64", 7, X86, 62, 8, errno.EPERM),
        ("x86_64", 7, X86, 62, 0, errno.EPERM),
        ("x86_64", 7, X86, 62, -1, errno.EPERM),
        ("x86_64", 7, X86, 302, 0, ALLOW),  # prlimit64
        ("x86_64", 7, X86, 302, 7, ALLOW),
        ("x86_64", 7, X86, 302, 8, errno.EPERM),
        ("x86_64", 7, X86, 90, 0, 0),  # chmod
        ("x86_64", None, X86, 90, 0, ALLOW),
        ("x86_64", 7, X86, 157, 1, errno.EPERM),  # prctl(PR_SET_PDEATHSIG)
        ("x86_64", 7, X86, 157, 15, ALLOW),
        ("aarch64", 7, ARM, 198, 2, errno.EPERM),  # socket
        ("aarch64", 7, X86, 198, 2, KILL),
        ("aarch64", None, ARM, 199, (1, 2), errno.EPERM),  # socketpair
        ("aarch64", None, ARM, 222, (0, 4096, 3, 0x21), errno.EPERM),  # mmap
        ("aarch64", None, ARM, 279, 0, errno.EPERM),  # memfd_create
        ("aarch64", None, ARM, 0, 0, errno.EPERM),  # io_setup
        ("aarch64", 7, ARM, 220, 0x003D0F00, ALLOW),  # clone of a thread
        ("aarch64", 7, ARM, 220, 0x01200011, errno.EPERM),
        ("aarch64", 7, ARM, 129, 8, errno.EPERM),  # kill
        ("aarch64", 7, ARM, 57, 0, ALLOW),  # close
    ],
)
def test_the_filter(
    machine: str,
    alone_pid: int | None,
    architecture: int,
    call: int,
    argument: int | tuple[int, ...],
    expected: str | int,
) -> None:
    arguments = argument if isinstance(argument, tuple) else (argument,)
    assert verdict(program_of(machine, alone_pid), architecture, call, arguments) == expected


def test_a_machine_whose_calls_are_not_known() -> None:
    with pytest.raises(OSError, match="system calls of riscv64 are not known"):
        program_of("riscv64", None)


ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
ASSERTS = ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]
READER = "```py\na, b = map(int, input().split())\nprint(a + b)\n```"


@pytest.mark.parametrize(
    ("reply", "tests", "score", "share"),
    [
        (ADD, ASSERTS, 1.0, 1.0),
        (ADD, "assert add(2, 3) == 5\nassert add(1, 1) == 2", 1.0, 1.0),
        (ADD.replace("+", "*"), ASSERTS, 0.0, 0.5),
        ("```python\nwrong\n```\n" + ADD, ASSERTS, 1.0, 1.0),
        (ADD + "```python\nwrong\n```\n", ASSERTS, 0.0, 0.0),
        ("def add(a, b): return a + b", ASSERTS, 0.0, 0.0),
        ("```python\nimport os; os._exit(0)\n```", ASSERTS, 0.0, 0.0),
        ("```python\ndef add(a, b): raise SystemExit(0)\n```", ASSERTS, 0.0, 0.0),
        ("```python\nprint('[0, \"\"]')\ndef add(a, b): return 1\n```", ASSERTS, 0.0, 0.0),
        ("```python\ndef add(a, b:\n```", ASSERTS, 0.0, 0.0),
        (READER, [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": "2\n\n"}], 1.0, 1.0),
        (READER, {"inputs": ["2 3", "x"], "outputs": ["5", "0"]}, 0.0, 0.5),
    ],
)
async def test_the_reward_for_code(reply: str, tests: object, score: float, share: float) -> None:
    assert await code(reply, tests) == {"score": score, "tests_passed": share, "timed_out": 0.0}
    assert (await code(reply, tests, share=True))["score"] == share


@pytest.mark.slow
async def test_code_that_hangs_keeps_what_it_has_passed() -> None:
    reply = "```python\ndef add(a, b):\n    while a == 0: pass\n    return a + b\n```"
    answer = await code(reply, ASSERTS, share=True, seconds=1.0)
    assert answer == {"score": 0.5, "tests_passed": 0.5, "timed_out": 1.0}
    answer = await code("```python\nwhile True: pass\n```", {"inputs": ["1"] * 9, "outputs": ["1"] * 9}, seconds=0.5)
    assert answer == {"score": 0.0, "tests_passed": 0.0, "timed_out": 1.0}


@pytest.mark.parametrize("tests", [[], "", [{"input": "2"}], [3], None, {"inputs": [], "outputs": []}])
async def test_tests_of_another_form_are_no_verdict(tests: object) -> None:
    with pytest.raises(ValueError, match="tests must be Python statements as text, a list of them"):
        await code(ADD, tests)


async def test_a_sandbox_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise SandboxError("no memory for a process")

    monkeypatch.setattr(sandbox, "_found", sandbox._Method(name=FILTERS))
    monkeypatch.setattr(sandbox, "_run", fail)
    with pytest.raises(SandboxError, match="no memory for a process"):
        await code(ADD, ASSERTS)


def test_the_last_block_that_is_python() -> None:
    assert last_program("```\nx = 1\n```\n```text\nno\n```") == "x = 1\n"
    assert last_program("```python\nx = 1") is None
    assert last_program("  ```Python\n  x = 1\n  ```") == "  x = 1\n"


async def test_a_killed_supervisor_leaves_no_files(method: str) -> None:
    before = set(scratch.folder().iterdir())
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    children = set(own.read_text().split())
    program = "open('made', 'w').write('x'); print('ready', flush=True); import time; time.sleep(60)"
    running = asyncio.create_task(run(program, limits=ROOMY))
    while not (supervisor := set(own.read_text().split()) - children):
        await asyncio.sleep(0)
    folders = [*scratch.folder().glob("sandbox-*/made")]
    while method == FILTERS and not folders:
        await asyncio.sleep(0)
        folders = [*scratch.folder().glob("sandbox-*/made")]
    os.kill(int(supervisor.pop()), signal.SIGKILL)
    with pytest.raises(SandboxError, match="could not be run in its sandbox|that watches a sandbox died"):
        await running
    assert set(scratch.folder().iterdir()) == before
