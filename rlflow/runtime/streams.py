"""Standard output and standard error of a run, which goes on without them.

Whoever reads them may go away: a pipe that is closed, a terminal, a full disk. What matters is in the run's files.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar, cast

T = TypeVar("T")


def open_closed_streams() -> None:
    """Point standard streams that were closed when the process started to nowhere.

    Otherwise the next file that is opened would take their number, and get what other libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number
    # Python has None for those.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def make_dispensable() -> None:
    """From now on a standard stream that cannot be written is given up, and the other one says so once."""
    if not isinstance(sys.stdout, _Dispensable):
        sys.stdout = cast(TextIO, _Dispensable(sys.stdout, "standard output", lambda: sys.stderr))
    if not isinstance(sys.stderr, _Dispensable):
        sys.stderr = cast(TextIO, _Dispensable(sys.stderr, "standard error", lambda: sys.stdout))


def discard(stream: TextIO) -> None:
    """Send to nowhere what the stream still holds, and what is written to its number from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


class _Dispensable:
    """A stream whose failures are nobody's."""

    def __init__(self, stream: TextIO, name: str, other: Callable[[], TextIO]) -> None:
        self._stream, self._name, self._other = stream, name, other
        self._is_lost = False

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._unless_lost(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _unless_lost(self, call: Callable[[], T], otherwise: T) -> T:
        if self._is_lost:
            return otherwise
        try:
            return call()
        except OSError as error:
            self._is_lost = True
            discard(self._stream)
            other = self._other()
            other.write(
                f"ALARM: {self._name} cannot be written ({error.strerror}); the run goes on without it, and its "
                "metrics.jsonl has every step\n"
            )
            other.flush()
            return otherwise
