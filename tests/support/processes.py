"""Ranks in processes of their own, forked from one that has imported what they need: most time would go there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, start_processes

_IMPORTED = ["pytest", "training", *(f"rlflow.workers.trainer.{each}" for each in ("fsdp", "deepspeed"))]


def spawn_ranks(num_ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(rank, *arguments)` for each rank in a process of its own, and wait for all. Raises what one raises."""
    ranks = start_ranks(num_ranks, work, *arguments)
    while not ranks.join():
        pass


def start_ranks(num_ranks: int, work: Callable[..., None], *arguments: Any) -> ProcessContext:
    """As `spawn_ranks`, but without waiting: whoever calls it joins what it returns."""
    ranks = start_processes(_work_and_leave, (work, arguments), num_ranks, join=False, start_method=_start_method())
    assert ranks is not None
    return ranks


def _start_method() -> str:
    if torch.cuda.is_available():
        return "spawn"  # a fork has no use of a driver that its parent has asked something
    forkserver.set_forkserver_preload(_IMPORTED)
    return "forkserver"


def _work_and_leave(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # An interpreter that ends while a thread of gloo drops a tensor unwinds that thread, which aborts the process.
    os._exit(0)
