"""Ranks in processes of their own, which import no more than what they play."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, spawn


def spawn_ranks(num_ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(rank, *arguments)` for each rank in a process of its own, and wait for all. Raises what one raises."""
    spawn(_work_and_leave, (work, arguments), nprocs=num_ranks)


def start_ranks(num_ranks: int, work: Callable[..., None], *arguments: Any) -> ProcessContext:
    """As `spawn_ranks`, but without waiting: whoever calls it joins what it returns."""
    ranks = spawn(_work_and_leave, (work, arguments), nprocs=num_ranks, join=False)
    assert ranks is not None
    return ranks


def _work_and_leave(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # An interpreter that ends while a thread of gloo drops a tensor unwinds that thread, which aborts the process.
    os._exit(0)
