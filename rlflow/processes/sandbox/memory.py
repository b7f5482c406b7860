"""The memory that a program and all that it started hold together, as /proc tells.

The limit of an address space holds for each process. Nothing but a look at them bounds their sum, and what threads and
open descriptors hold in the kernel.
"""

import contextlib
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_THREAD_BYTES = 2**15
"""Its stack in the kernel and what describes it."""
_DESCRIPTOR_BYTES = 2**18
"""What a socket holds at most: its buffer of 212,992 bytes (`net.core.wmem_default`), and what describes it."""
_GONE = (FileNotFoundError, ProcessLookupError)


def held_bytes(ancestor: int, generation: int, limit: int) -> int:
    """Bytes held by the processes that are `generation` below `ancestor`, and all below these.

    Pages that several share are divided among them only if the sum would be above `limit` otherwise, because that takes
    long to find out.

    Raises:
        OSError: /proc does not tell.
    """
    waiting, found, in_kernel, resident = [ancestor], list[int](), 0, 0
    for _ in range(generation):
        waiting = [child for process in waiting for child in _children(process)]
    for process in waiting:
        with contextlib.suppress(*_GONE):
            in_kernel += _THREAD_BYTES * len(os.listdir(f"/proc/{process}/task"))
            in_kernel += _DESCRIPTOR_BYTES * len(os.listdir(f"/proc/{process}/fd"))
            with open(f"/proc/{process}/statm") as file:
                resident += _PAGE * int(file.read().split()[1])
            found.append(process)
            if in_kernel <= limit:
                waiting += _children(process)
    if in_kernel + resident > limit:
        resident = sum(map(_proportional, found))
    return in_kernel + resident


def _children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(*_GONE):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _proportional(process: int) -> int:
    """Resident bytes; a page that n processes share counts as one nth."""
    with contextlib.suppress(*_GONE), open(f"/proc/{process}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return 0
