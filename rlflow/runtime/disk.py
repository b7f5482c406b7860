"""How files last, and what a person is told when the disk is full."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlflow.errors import RunError

RESUMES = "run the same command again: it resumes from the last complete checkpoint"


@contextmanager
def disk_errors(what: str, folder: Path, afterwards: str = RESUMES) -> Iterator[None]:
    """Turn "no space" into a RunError that says what to free; `afterwards` says what to do then."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        free_mb = shutil.disk_usage(existing).free >> 20
        raise RunError(
            f"no disk space left for {what} in {folder} ({free_mb} MB free); free some and {afterwards}"
        ) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _error_number(error: OSError | SafetensorError) -> int | None:
    """The system's error number; safetensors gives it only in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
