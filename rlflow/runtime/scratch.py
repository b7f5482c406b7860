"""The temporary files of a run: one folder a run and machine, which goes when no process of the run lives any more.

    /tmp/rlflow-run-0123456789ab-1000/     of user 1000, who alone can enter it
        token, ray/                        of a Ray that the run started
        rollout-engine-0/, reward/ ...     TMPDIR of each actor and of all that it starts
    /dev/shm/rlflow-run-0123456789ab-1000-*  shared memory: the name says whose it is

Each process of the run shares a lock (flock) of the folder, which the kernel releases however the process ends. Who can
take it alone may remove everything. The lock is on the folder itself: what tidies up /tmp (systemd-tmpfiles) leaves
such a folder alone. Descriptors end with exec, so that no program of a model or a user keeps the lock.
"""

import atexit
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.runtime.environment import variables
from rlflow.runtime.trees import remove_tree

ROOT = Path("/tmp")
"""Where the folders are, whatever TMPDIR says: Ray adds 68 bytes to the path for its sockets, which has at most 107."""
SHARED = Path("/dev/shm")
VARIABLE = "RLFLOW_SCRATCH"
"""The run's name, for all that it starts, also on other machines and there perhaps as another user."""
END_S = 10.0
"""How long the last processes of a run may take to end before its folder is removed all the same."""
MAX_LOG_BYTES, MAX_LOGS_BYTES = 1 << 20, 32 << 20
"""What is kept of a failed run: the end of each log, and of all together, the newest first."""
_PREFIX = "rlflow-run-"
_RUN_DIR = "run_dir"
_NO_LINK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_making = threading.Lock()
_held: dict[Path, int] = {}
"""Folder -> the descriptor with which this process shares its lock."""


@contextmanager
def opened(run_dir: Path | None = None) -> Iterator[Path]:
    """A new folder, as long as the block lasts.

    With the directory of a run: what dead runs left is removed first. If the run fails, what its processes logged is
    copied to run_dir/logs, and a note of the error says so.
    """
    if run_dir is not None:
        leavings(run_dir, remove=True)
    owner = os.getpid()
    name = f"{_PREFIX}{os.urandom(6).hex()}"
    path = _folder_of(name)
    _held[path] = _hold(path)
    try:
        (path / _RUN_DIR).write_text(str(run_dir))
        with variables({VARIABLE: name}):
            yield path
    except Exception as error:
        if run_dir is not None and not isinstance(error, ConfigError):
            _lock_alone(_held[path], END_S)  # until all has been logged
            _point_to_logs(error, path, run_dir)
        raise
    finally:
        if os.getpid() == owner:  # and no copy of it that forked and ends
            lock = _held.pop(path)
            _lock_alone(lock, END_S)
            _remove_run(path)
            os.close(lock)
            if run_dir is not None:
                leavings(remove=True)  # what was still ending when this run began


def folder() -> Path:
    """The folder of the run that this process belongs to. A process of no run gets one of its own until it ends."""
    with _making:
        if VARIABLE not in os.environ:
            stack = ExitStack()
            stack.enter_context(opened())
            atexit.register(stack.close)
    return _folder_of(os.environ[VARIABLE])


def hold() -> int:
    """Share the lock of the run's folder until this process ends; returns the descriptor."""
    path = folder()
    if path not in _held:
        is_new = not path.exists()
        _held[path] = _hold(path)
        if is_new:  # the first process of the run on this machine
            leavings(remove=True)
    return _held[path]


def enter(part: str) -> None:
    """Begin an actor, which keeps its temporary files, as does all that it starts, in a part of the folder of its own.

    What is there already was left by a process that this one replaces, and is removed.
    """
    import tempfile  # late, to keep the processes small that only hold the lock

    hold()
    place = folder() / part
    if place.exists():
        _remove(place)
    place.mkdir()
    # This is a cache, which torch would keep in TMPDIR; later runs find it again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.geteuid()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)


def leavings(run_dir: Path | None = None, *, remove: bool) -> dict[Path, int]:
    """The folders of this user's runs of which no process lives on this machine, removed if so wanted.

    Path -> bytes on disk and in shared memory.

    What the last run in `run_dir`, if it was killed, has logged is copied to run_dir/logs; its processes are given the
    time to end.
    """
    found = {}
    for path in sorted(ROOT.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(path, _NO_LINK)
        except OSError:
            continue  # no folder, or somebody else's
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                continue
            is_predecessor = run_dir is not None and _read(path / _RUN_DIR) == str(run_dir)
            if not _lock_alone(lock, END_S if is_predecessor else 0.0) or not _is_at(path, lock):
                continue
            found[path] = _size(path)
            if remove and run_dir is not None and is_predecessor:
                _keep_logs(path, run_dir)
            if remove:
                _remove_run(path)
        finally:
            os.close(lock)
    return found


def _folder_of(name: str) -> Path:
    return ROOT / f"{name}-{os.geteuid()}"


def _hold(path: Path) -> int:
    """A descriptor of the folder, which is made unless it is there, with its lock shared.

    Raises ConfigError when something else has that name.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            lock = os.open(path, _NO_LINK)
            found = os.fstat(lock)
        except FileNotFoundError:
            continue  # it was removed just now
        except OSError as error:
            raise ConfigError(_foreign(path)) from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(lock)
            raise ConfigError(_foreign(path))
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_at(path, lock):
            return lock
        os.close(lock)


def _foreign(path: Path) -> str:
    return f"{path} must be a folder that only this user can enter, for a run's temporary files, and is not; remove it"


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to this folder, and not through a link."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_alone(lock: int, patience_s: float) -> bool:
    """Wait until no other process shares the lock. Returns whether that was so in time."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    waiting = threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX), daemon=True)
    if patience_s:
        waiting.start()
        waiting.join(patience_s)
    return bool(patience_s) and not waiting.is_alive()


def _remove_run(path: Path) -> None:
    """A run's folder and shared memory, whose lock this process holds."""
    gone = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    # From here on, who looks for the folder makes a new one, and nothing is put into this one.
    with suppress(FileNotFoundError):
        path.rename(gone)
    _remove(gone)


def _remove(place: Path) -> None:
    """A folder, with the shared memory that is named after it or after a file in it."""
    for memory in _shared(place):
        memory.unlink(missing_ok=True)
    remove_tree(place)


def _shared(place: Path) -> list[Path]:
    # vLLM's workers name theirs after the file in which they met (0.32, `_CPUSHMDistributed.make_group_name`).
    meetings = [*place.glob("vllm_dist_*"), *place.glob("*/vllm_dist_*")]
    names = (*(f"{each.name}-" for each in meetings), f"{place.name.partition('.')[0]}-")
    return [each for each in SHARED.iterdir() if each.name.startswith(names) and _is_own(each)]


def _is_own(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return path.lstat().st_uid == os.geteuid()
    return False


def _size(path: Path) -> int:
    files = [Path(parent, name) for parent, _, names in os.walk(path) for name in names]
    sizes = []
    for file in (*files, *_shared(path)):
        with suppress(FileNotFoundError):
            sizes.append(file.lstat().st_blocks * 512)
    return sum(sizes)


def _point_to_logs(error: Exception, path: Path, run_dir: Path) -> None:
    """Keep the logs of a run that failed, and have the error name their new place."""
    try:
        kept = _keep_logs(path, run_dir)
    except OSError as problem:
        error.add_note(f"what the processes of the run have logged could not be kept in {run_dir}: {problem}")
        return
    if kept is not None:
        old = re.compile(re.escape(f"{path}/ray/session_") + "[^/]*/logs")
        error.args = tuple(old.sub(str(kept), each) if isinstance(each, str) else each for each in error.args)
        error.add_note(f"what the processes of the run have logged is in {kept}")


def _keep_logs(path: Path, run_dir: Path) -> Path | None:
    """Copy the ends of a run's logs to run_dir/logs, in place of what is there; None if there are none."""
    files = [file for file in path.glob("ray/session_[0-9]*/logs/*") if file.is_file() and not file.is_symlink()]
    if not files:
        return None
    kept, left = run_dir / "logs", MAX_LOGS_BYTES
    remove_tree(kept)
    kept.mkdir()
    for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        length = min(file.stat().st_size, MAX_LOG_BYTES, left)
        if length:
            with file.open("rb") as source:
                source.seek(-length, os.SEEK_END)
                (kept / file.name).write_bytes(source.read(length))
            left -= length
    return kept


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
