"""A process that shows that it lives, so that its companion (`rlflow.processes.companion`) kills it when it hangs."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlflow.processes import companion
from rlflow.runtime import scratch

BEATS = 4
"""In one heartbeat_s."""


def start_pulse(name: str, heartbeat_s: float, log: Path, *, leads_group: bool = False) -> None:
    """From now on, this process is killed when it hangs for `heartbeat_s`, and so is what it starts when it is stopped.

    A line for each such kill goes to `log` and to standard error; it calls this process `name`. With `leads_group` this
    process and its later children become a group, which is killed when this process ends, however it ends.
    """
    if leads_group and os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    command = [
        *(sys.executable, "-I", "-S", companion.__file__),
        *(str(os.getpid()), str(heartbeat_s), str(int(leads_group)), name, str(log)),
    ]

    # The folder of temporary files is in use until the group is gone.
    lock = [scratch.hold()] if leads_group else []

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, pass_fds=lock)

    # The first one at once: a thread may never get Python's lock.
    threading.Thread(target=_beat, args=(start, start(), heartbeat_s / BEATS), name="pulse", daemon=True).start()


def _beat(start: Callable[[], subprocess.Popen[bytes]], process: subprocess.Popen[bytes], seconds: float) -> None:
    while True:
        assert process.stdin is not None
        try:
            process.stdin.write(b".")
        except BrokenPipeError:  # somebody has killed the companion
            process.stdin.close()
            process.wait()
            process = start()
        time.sleep(seconds)
