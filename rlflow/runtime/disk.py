"""How files are written and last, and what a person is told when a disk refuses."""

import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from rlflow.errors import RunError

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
_PART_BYTES = 1 << 20
"""Written and digested at once, so that a processor's cache holds it in between."""
_DTYPES = {"f4": "F32", "i4": "I32", "i8": "I64", "b1": "BOOL", "u1": "U8", "u2": "U16"}
"""NumPy's names of what we keep on disk -> those of safetensors."""


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


def write_whole(path: Path, text: str, what: str) -> None:
    """Write `what` to a file, whole or not at all. Raises RunError when the disk is full."""
    partial = path.with_name(f"{path.name}.partial")
    with disk_errors(what, path.parent):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def write_digested(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file; returns the SHA-256 of what it was given, so that nothing is read back from the disk."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in map(memoryview, parts):
            for start in range(0, len(part), _PART_BYTES):
                digest.update(part[start : start + _PART_BYTES])
                file.write(part[start : start + _PART_BYTES])
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; returns its SHA-256. The writer of safetensors gives no digest, and what it wrote would
    have to be read back."""
    flat = {name: np.ascontiguousarray(each).reshape(-1).view(np.uint8) for name, each in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # The largest elements come first, so that all are aligned when the file is mapped.
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    end = 0
    for name in order:
        start, end = end, end + flat[name].nbytes
        dtype = _DTYPES[tensors[name].dtype.str[1:]]
        header[name] = {"dtype": dtype, "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_digested(path, [len(text).to_bytes(8, "little"), text, *(flat[name].data for name in order)])


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
