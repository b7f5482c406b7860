"""Neighbouring ranks that share the work on the same micro-batches: each has slices of layers, or parts of the row.

Each rank takes 1 / size of the loss, and differentiates what it computed itself. So gradients are parts, which add up
over the group as over all ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(kw_only=True, slots=True, frozen=True)
class RankGroup:
    """The ranks that share the work on the same micro-batches."""

    rank: int = 0
    """This rank's place in the group."""
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    """None if there are no other ranks to talk to: with one rank, or in a dry run."""

    def add_up(self, part: Tensor) -> Tensor:
        """The sum over the group; its gradient is the sum of the gradients."""
        if self.process_group is None:
            return part
        total: Tensor = _Sum.apply(part, self.process_group)  # pyright: ignore[reportAssignmentType]
        return total

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, equal in shape, side by side along `dim`; without gradient."""
        if self.process_group is None:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def slice(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of what `join` gives."""
        return whole.chunk(self.size, dim)[self.rank]


ALONE = RankGroup()


class _Sum(torch.autograd.Function):
    """Backward is the same sum as forward: each rank's result depends on all parts, and each loss on all results."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return _summed(part, process_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(gradients[0], ctx.process_group), None


def _summed(part: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group)
    return total
