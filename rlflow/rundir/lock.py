"""Which process writes a run's directory, and how it is asked to stop (`rlflow stop RUN`).

A file in the directory is locked, and names the process that holds the lock.

The lock (flock) ends with its process, however that ends. On a network file system it works between machines if the
server keeps the locks: NFS 4, CephFS, Lustre mounted with `flock`. If each machine keeps its own (Lustre with
`localflock`, NFS with `local_lock`, most object stores), it keeps out only processes of the same machine.
"""

import fcntl
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from rlflow.config import DeadlinesConfig
from rlflow.errors import ConfigError, RunError

NAME = ".lock"


@dataclass(kw_only=True, slots=True, frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    started: int
    """When the process started, in clock ticks since the machine did: tells it from a later process with its pid."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder while the block lasts. Raises ConfigError when another process holds it."""
    with _opened(folder) as file:
        if not _try_lock(file, folder):
            raise ConfigError(
                f"{folder} is being written by {_read(file) or 'another process'}; wait for it to end, end it with "
                f"`rlflow stop {folder}`, or choose another run.dir"
            )
        os.ftruncate(file, 0)
        started = _started(os.getpid())
        assert started is not None
        holder = Holder(host=socket.gethostname(), pid=os.getpid(), started=started)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(file, 0)


def is_held(folder: Path) -> bool:
    """Whether a process writes the directory. A run that begins at this moment is not disturbed."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        holder = _read(file)
        if holder is None or holder.host == socket.gethostname():
            return holder is not None and _started(holder.pid) == holder.started
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held from there, or a file system without locks
        return True
    finally:
        os.close(file)
    return False


def seconds_to_stop(deadlines: DeadlinesConfig) -> float:
    """How long to wait for a run that was asked to stop: each wait of one step, and two checkpoints, the one that is
    being written and the last.

    This is no bound: an evaluation under way takes longer, and so do several waits of one kind that all last until
    their deadline.
    """
    return deadlines.group_s + deadlines.train_s + deadlines.weights_s + 2 * deadlines.checkpoint_s


def stop(folder: Path, timeout_s: float | None) -> str:
    """Make the run that writes a directory finish its step, save and end (SIGTERM). Returns what happened, as text.

    `timeout_s` None waits as long as the deadlines that the run was started with allow. Raises ConfigError when its
    process cannot be reached from here, RunError when it takes longer.
    """
    if timeout_s is None:
        settings = folder / "config.yaml"  # not there yet if the run has only just begun
        kept = yaml.safe_load(settings.read_text())["deadlines"] if settings.exists() else {}
        timeout_s = seconds_to_stop(DeadlinesConfig(**kept))
    if not timeout_s > 0:
        raise ConfigError(f"--timeout must be positive; got {timeout_s:g}")
    with _opened(folder) as file:
        if _try_lock(file, folder):
            return _nobody(folder, _read(file))
        holder = _read(file)
        if holder is None:
            raise RunError(f"{folder} is being written by a process that has not said which one yet; call again")
        if holder.host != socket.gethostname():
            raise ConfigError(
                f"{folder} is being written by {holder}, and this is {socket.gethostname()}; call `rlflow stop` there, "
                "or `rlflow submit --stop JOB cluster=...` for a job"
            )
        with _process_of(holder) as process:
            if process is None and _try_lock(file, folder):
                return _nobody(folder, None)  # it has ended meanwhile
            if process is None:
                raise ConfigError(
                    f"{folder} is being written by {holder}, which cannot be seen from here; call `rlflow stop` in its "
                    "container"
                )
            signal.pidfd_send_signal(process, signal.SIGTERM)
            if not select.select([process], [], [], timeout_s)[0]:
                raise RunError(
                    f"{holder} is still writing {folder} after {timeout_s:g} s; it finishes its step and saves: wait "
                    "longer with --timeout"
                )
    return f"{holder} has ended; the same command with run.dir={folder} goes on with its run"


def _nobody(folder: Path, last: Holder | None) -> str:
    if last is None or last.host == socket.gethostname():
        return f"no run is writing {folder}"
    # It was killed, or each machine keeps its own locks of this file system.
    return f"no run holds {folder} on this machine; the last one, {last}, did not end by itself"


@contextmanager
def _process_of(holder: Holder) -> Iterator[int | None]:
    """A pidfd of the holder, or None if it is not visible from here. A recycled pid is not mistaken for it."""
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield process if _started(holder.pid) == holder.started else None
    finally:
        os.close(process)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def _try_lock(file: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the file system of {folder} keeps no locks ({error.strerror}), so that two runs could write there; mount "
            "it with them (Lustre: -o flock), or choose another run.dir"
        ) from error
    return True


def _read(file: int) -> Holder | None:
    """The holder; None in the moment between taking the lock and writing the name."""
    text = os.pread(file, 4096, 0)
    return Holder(**json.loads(text)) if text else None


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
