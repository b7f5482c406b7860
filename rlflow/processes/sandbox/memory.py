"""The memory that a program and all that it started hold together, as /proc tells.

The limit of an address space holds for each process. Nothing but a look at them bounds their sum, and what threads and
open descriptors hold in the kernel.
"""

import contextlib
import os

from rlflow.processes.companion import GONE, children_of
from rlflow.processes.sandbox.init import MAX_OPEN_FILES

_PAGE = os.sysconf("SC_PAGE_SIZE")
_THREAD_BYTES = 2**15
"""Its stack in the kernel and what describes it."""
_DESCRIPTOR_BYTES = 2**18
"""What a socket holds at most: its buffer of 212,992 bytes (`net.core.wmem_default`), and what describes it."""


def held_bytes(ancestor: int, generation: int, limit: int) -> int:
    """Bytes held by the processes that are `generation` below `ancestor`, and all below these.

    Pages that several share are divided among them only if the sum would be above `limit` otherwise, because that takes
    long to find out.

    Raises:
        OSError: /proc does not say what a process has started.
    """
    if not os.path.exists("/proc/thread-self/children"):
        raise OSError(0, "/proc/*/task/*/children is missing, so that a program's processes cannot be measured")
    waiting, resident, in_kernel = [ancestor], dict[int, int](), 0
    for _ in range(generation):
        waiting = [child for process in waiting for child in children_of(process)]
    for process in waiting:
        with contextlib.suppress(*GONE):
            in_kernel += _THREAD_BYTES * len(os.listdir(f"/proc/{process}/task"))
            in_kernel += _DESCRIPTOR_BYTES * _num_open_files(process)
            with open(f"/proc/{process}/statm") as file:
                resident[process] = _PAGE * int(file.read().split()[1])
            if in_kernel <= limit:
                waiting += children_of(process)
    if (held := in_kernel + sum(resident.values())) > limit:
        return in_kernel + sum(_proportional(process, most) for process, most in resident.items())
    return held


def _num_open_files(process: int) -> int:
    """The most that there may be if nobody may see them, as before a process becomes the program."""
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except PermissionError:
        return MAX_OPEN_FILES


def _proportional(process: int, resident: int) -> int:
    """Resident bytes, where a page that n processes share counts one nth; without that if it must not be seen."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except PermissionError:
        return resident
    except GONE:
        return 0
