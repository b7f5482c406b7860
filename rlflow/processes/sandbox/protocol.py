"""What the caller and the supervisor of a sandboxed program say to each other: a frame of JSON each way."""

import json
from collections.abc import Sequence
from typing import Literal, TypedDict

from rlflow.processes import frames

NAMESPACES = "namespaces"
BUBBLEWRAP = "bubblewrap"
FILTERS = "filters"
_MAX_BYTES = 2**32 - 1


Limit = Literal["time", "memory"]
TIME: Limit = "time"
MEMORY: Limit = "memory"


class ProgramRequest(TypedDict):
    method: str
    bwrap: str
    """The program bubblewrap; "" for the other methods."""
    package: str
    """The folder that holds the package rlflow."""
    readable: list[str]
    """Absolute paths that the program may read; none is below another one."""
    folder: str
    """The program's own, which the supervisor makes and removes; only for filters."""
    command: list[str]
    files: dict[str, str]
    """Relative path: content in base 64."""
    stdin: str
    """In base 64."""
    link: int | None
    """A descriptor that the supervisor inherits, to be standard input instead of `stdin`."""
    seconds: float
    cpu_seconds: int
    memory_mb: int
    file_mb: int
    processes: int


class ProgramReport(TypedDict):
    failure: str
    """Why the program could not be started; "" when it could."""
    status: int | None
    """As `os.wait` gives it; None when the program was killed with all others."""
    end: Limit | None
    """The limit that ended it, of those that the supervisor watches."""
    seconds: float


def frame_of(content: ProgramRequest | ProgramReport) -> bytes:
    return frames.frame_of(json.dumps(content).encode(), _MAX_BYTES)


def receive(descriptor: int) -> ProgramRequest:
    """Raises EOFError when the caller has gone."""
    return json.loads(frames.receive(descriptor, _MAX_BYTES))


def interpreter_arguments(package: str, words: Sequence[str] = ()) -> list[str]:
    """Those of an interpreter that runs the supervisor with nothing but the standard library and this package."""
    boot = "import sys; sys.path.insert(0, sys.argv[1]); from rlflow.processes.sandbox.supervisor import main; main()"
    return ["-I", "-S", "-B", "-c", boot, package, *words]
