"""What a transfer moves, next to what gathering the whole model and broadcasting it to all engines would. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.weights.shape.layout import EngineLayout, Layout
from rlflow.weights.shape.pieces import IntArray
from rlflow.weights.shape.plan import TransferPlan


@dataclass(kw_only=True, slots=True, frozen=True)
class Traffic:
    """Bytes that reach each rank over a link; each of them has left another rank."""

    trainer: IntArray  # [ranks of the trainer]
    engines: tuple[IntArray, ...]  # for each engine [ranks]

    @property
    def total(self) -> int:
        return int(self.trainer.sum() + sum(each.sum() for each in self.engines))

    @property
    def largest(self) -> int:
        """What the busiest rank receives."""
        return int(max(each.max(initial=0) for each in (self.trainer, *self.engines)))


def planned(plan: TransferPlan) -> Traffic:
    """With a plan the trainer's ranks receive nothing."""
    return Traffic(trainer=np.zeros_like(plan.sent), engines=plan.received)


def gathered(source: Layout, engines: Sequence[EngineLayout]) -> Traffic:
    """Every rank of the trainer gathers the whole model; then every rank of every engine is sent it.

    So it is with a DTensor's `full_tensor`, in the trainer's dtype, and a broadcast in the engines' dtype.
    """
    held = [source.bytes_held(rank) for rank in range(source.num_ranks)]
    return Traffic(
        trainer=source.num_bytes - np.array(held, dtype=np.int64),
        engines=tuple(np.full(each.layout.num_ranks, each.layout.num_bytes, dtype=np.int64) for each in engines),
    )
