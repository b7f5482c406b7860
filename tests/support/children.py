"""Commands that a test starts, reads while they run, and ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 300


@contextmanager
def ended_after(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which does not outlive the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read its output up to the line that has the text, and return that line; kills it when that takes too long."""
    assert process.stdout is not None
    seen = []
    deadline = threading.Timer(TIMEOUT_S, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            print(line, end="")
            seen.append(line)
            if text in line:
                return line
    finally:
        deadline.cancel()
    raise AssertionError(f"the process ended, or was killed, without printing {text!r}: {''.join(seen[-20:])}")
