"""The environment of a process: variables for a while, and how a process that computes on the CPU is set up.

Call `share_cpu` before torch is imported, because OpenMP reads its settings once.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SPINS = "50000"
"""Turns (about 0.1 ms) that an idle thread waits for work before it sleeps: long enough for the gap between two
kernels, short enough to leave the core to the other processes of the run."""

# From malloc.h. Large tensors then come from memory that the process keeps, instead of from fresh pages each time.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a process that computes beside its main thread, where glibc keeps no memory; see `keep_memory`."""


def share_cpu(threads: int) -> None:
    """Use `threads` OpenMP threads in this process and its children, beside other processes that do the same."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def keep_memory() -> None:
    """Let glibc keep freed memory: returning large blocks and faulting them in again costs a tenth of a step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


@contextmanager
def variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set these environment variables for the block; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
