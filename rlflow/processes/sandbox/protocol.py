"""What the caller and the supervisor of a sandboxed program say to each other, on a socket that only they hold.

One frame each way: 4 bytes of length, big-endian, then JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TypedDict, cast

NAMESPACES = "namespaces"
BUBBLEWRAP = "bubblewrap"
FILTERS = "filters"


class Request(TypedDict):
    method: str
    bwrap: str
    """The program bubblewrap; "" for the other methods."""
    package: str
    """The folder that holds the package rlflow."""
    readable: list[str]
    """Absolute paths that the program may read; none is below another one."""
    command: list[str]
    files: dict[str, str]
    """Relative path: content in base 64."""
    stdin: str
    """In base 64."""
    seconds: float
    cpu_seconds: int
    memory_mb: int
    file_mb: int
    processes: int


class Report(TypedDict):
    failure: str
    """Why the program could not be started; "" when it could."""
    status: int | None
    """As `os.wait` gives it; None when the program was killed with all others."""
    is_timed_out: bool
    seconds: float


def frame_of(content: Request | Report) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "big") + text


def receive(descriptor: int) -> Request:
    """Raises EOFError when the caller has gone."""
    size = int.from_bytes(_exactly(descriptor, 4), "big")
    return cast(Request, json.loads(_exactly(descriptor, size)))


def _exactly(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def interpreter_arguments(package: str, words: Sequence[str] = ()) -> list[str]:
    """Of an interpreter that runs the supervisor; it imports the standard library and this package, no more."""
    boot = "import sys; sys.path.insert(0, sys.argv[1]); from rlflow.processes.sandbox.supervisor import main; main()"
    return ["-I", "-S", "-B", "-c", boot, package, *words]
