"""How files are written and last, and what a person is told when the disk is full."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from rlflow.errors import RunError

_PART_BYTES = 1 << 20
"""Written and digested at once, so that a processor's cache holds it in between."""
_DTYPES = {"f4": "F32", "i4": "I32", "i8": "I64", "b1": "BOOL", "u1": "U8"}
"""NumPy's names of what we keep on disk -> those of safetensors."""
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


def _error_number(error: OSError | SafetensorError) -> int | None:
    """The system's error number; safetensors gives it only in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
