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
RESUMES = "run the same command again: it resumes from the last complete checkpoint"


_CAUSES = {
    errno.ENOSPC: ("no disk space left for {what} in {where} ({free} MB free)", "free some, or move run.dir,"),
    errno.EDQUOT: ("your quota leaves no space for {what} in {where}", "free some, or move run.dir,"),
    errno.EFBIG: ("no file may become as large as {what} in {where}", "raise the limit (ulimit -f)"),
    errno.EROFS: ("{what} cannot be written: {where} is read-only", "have it mounted for writing, or move run.dir,"),
    errno.EACCES: ("{what} cannot be written: {where} does not let you", "give yourself the rights, or move run.dir,"),
    errno.EIO: ("{what} cannot be written: the disk of {where} fails", "look at it (dmesg), or move run.dir,"),
}
"""The system's error number -> (what is wrong, what to do)."""
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_CURES_OF_SQLITE = {
    sqlite3.SQLITE_BUSY: "end the process that keeps it locked (`fuser` names it)",
    sqlite3.SQLITE_CORRUPT: "leave it where it is",
    sqlite3.SQLITE_NOTADB: "leave it where it is",
}


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
    number = _error_number(error)
    if number in _CAUSES:
        wrong, cure = _CAUSES[number]
        existing = next(each for each in (where, *where.absolute().parents) if each.exists())
        wrong = wrong.format(what=what, where=where, free=shutil.disk_usage(existing).free >> 20)
        said = f" (SQLite: {error})" if isinstance(error, sqlite3.Error) else ""
        return f"{wrong}{said}; {cure}"
    if isinstance(error, sqlite3.Error):
        cure = _CURES_OF_SQLITE.get(_code(error), "look at its disk (dmesg)")
        return f"{what} in {where} cannot be used (SQLite: {error}); {cure}"
    return None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _error_number(error: Exception) -> int | None:
    """The system's error number; safetensors gives it only in its text, SQLite has its own."""
    if isinstance(error, OSError):
        return errno.EACCES if error.errno == errno.EPERM else error.errno
    if isinstance(error, sqlite3.Error):
        return _OF_SQLITE.get(_code(error))
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code, without what the extended one adds."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
