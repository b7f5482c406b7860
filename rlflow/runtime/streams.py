"""Standard output and standard error of a run, which goes on without them.

Their reader may go away (a pipe that is closed, a terminal, a full disk) or stop to read (a pager, Ctrl-S). What
matters is in the run's files.
"""

import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

PATIENCE_S = 1.0
"""Seconds for a reader that is slow; what is written after that is left out until it reads again."""
_PART_BYTES = 256
"""As much as a pipe or a terminal that says that it can be written takes at once."""


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
    """From now on a standard stream that cannot be written is given up, and the other one says so once.

    One that is no file, as in a notebook, stays as it is.
    """
    if _is_file(sys.stdout):
        sys.stdout = cast(TextIO, _Dispensable(sys.stdout, "standard output", lambda: sys.stderr))
    if _is_file(sys.stderr):
        sys.stderr = cast(TextIO, _Dispensable(sys.stderr, "standard error", lambda: sys.stdout))


def discard(stream: TextIO) -> None:
    """Send to nowhere what the stream still holds, and what is written to its number from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _is_file(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except OSError:
        return False
    return not isinstance(stream, _Dispensable)


class _Dispensable:
    """A stream whose failures are nobody's, and for which nobody waits long."""

    def __init__(self, stream: TextIO, name: str, other: Callable[[], TextIO]) -> None:
        stream.flush()
        self._stream, self._name, self._other = stream, name, other
        self._is_lost = False
        self._num_left_out = 0
        """Texts that a reader who had stopped to read misses."""

    def write(self, text: str) -> int:
        if not self._is_lost:
            try:
                self._send(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _send(self, text: str) -> None:
        if self._num_left_out:
            if not self._can_be_written(0.0):
                self._num_left_out += 1
                return
            text, self._num_left_out = f"[{self._num_left_out} messages were not read in time]\n{text}", 0
        data = text.encode(self._stream.encoding, self._stream.errors or "strict")
        for start in range(0, len(data), _PART_BYTES):
            if not self._can_be_written(PATIENCE_S):
                self._num_left_out = 1
                return
            part = data[start : start + _PART_BYTES]
            while part:
                part = part[os.write(self._stream.fileno(), part) :]

    def _can_be_written(self, seconds: float) -> bool:
        return bool(select.select([], [self._stream.fileno()], [], seconds)[1])

    def _give_up(self, error: OSError) -> None:
        self._is_lost = True
        discard(self._stream)
        self._other().write(
            f"ALARM: {self._name} cannot be written ({error.strerror}); the run goes on without it, and its "
            "metrics.jsonl has every step\n"
        )
