"""Where temporary files go, how files last, and what a person is told when the disk is full or cannot be written."""

import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlflow.errors import RunError

TEMPORARY = "/tmp"
"""The folder for sockets, whatever TMPDIR says: a socket's path has at most 107 bytes."""
RESUMES = (
    "run the same command again, with run.dir moved to another disk if need be: it resumes from the last complete "
    "checkpoint"
)
_CURES: dict[int | None, str] = {
    errno.ENOSPC: "free some",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "have it mounted for writing",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EIO: "look at that disk (dmesg)",
}
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
"""Others are the disk's, or nobody knows whose."""


@contextmanager
def disk_errors(what: str, where: Path, afterwards: str = RESUMES) -> Iterator[None]:
    """Turn what a disk refuses to do with `what` in the folder or file `where` into a RunError that names the cure.

    `afterwards` says what to do then. An error of another kind passes through.
    """
    try:
        yield
    except (OSError, SafetensorError, sqlite3.Error) as error:
        if (told := describe_disk_error(error, what, where)) is None:
            raise
        raise RunError(f"{told} and {afterwards}") from error


def describe_disk_error(error: Exception, what: str, where: Path) -> str | None:
    """In one sentence, what a disk refused to do and the cure; None for an error of another kind."""
    number, said = _error_number(error), getattr(error, "strerror", None) or str(error)
    if number not in _CURES:
        return None
    cure = "end the process that keeps it locked" if _code(error) == sqlite3.SQLITE_BUSY else _CURES[number]
    if number != errno.ENOSPC:
        return f"{what} cannot be written in {where}: {said}; {cure}"
    existing = next(each for each in (where, *where.absolute().parents) if each.exists())
    return f"no disk space left for {what} in {where} ({shutil.disk_usage(existing).free >> 20} MB free); {cure}"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _error_number(error: Exception) -> int | None:
    """The system's error number; safetensors gives it only in its text, SQLite has numbers of its own."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, sqlite3.Error):
        return _OF_SQLITE.get(_code(error), errno.EIO)
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _code(error: Exception) -> int:
    """SQLite's primary code of an error, which is in the last byte; 0 if the error is not SQLite's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
