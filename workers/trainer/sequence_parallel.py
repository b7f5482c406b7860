"""Sequence parallelism as in Ulysses (arXiv:2309.14509): a group of ranks shares the tokens of each row.

    row of T tokens -> P = T / S on each of S ranks -> layers -> log-probabilities of the loss tokens that a rank's own
    states predict -> summed over the group, so that every rank has those of the whole row -> Objective

Everything is computed token by token, on P tokens, but attention. For that the ranks exchange: each gives the others
the heads that they compute, and gets all tokens of its own heads (all-to-all); afterwards they exchange the outputs
back. So attention sees whole rows, with the masks that it has without sequence parallelism.

    queries [P, H, D] on each rank -> [T, H / S, D] -> attention -> [T, H / S, D] -> [P, H, D]

The row is padded at its end so that S divides it. A gradient goes the same way back, to the rank that has the token.
Every rank computes the objective of the whole row, because a loss may need all tokens of a sequence, and takes 1 / S of
it (rank_group.py).
Shape letters: T tokens of the row with padding, P tokens of a rank, S ranks, H heads, D head dimension, N loss tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rlflow.batching.pack import IndexArray
from rlflow.config import TrainerConfig
from rlflow.errors import ConfigError
from rlflow.workers.trainer.attention import ATTENTION, packed_attention
from rlflow.workers.trainer.process_group import join_subgroup
from rlflow.workers.trainer.rank_group import ALONE, RankGroup


def join_sequence_group(trainer: TrainerConfig, rank: int, timeout_s: float) -> RankGroup:
    """The neighbours with which this rank shares rows; collective. The ranks have met."""
    size = trainer.sequence_parallel
    if size == 1:
        return ALONE
    groups = [range(first, first + size) for first in range(0, trainer.ranks, size)]
    return RankGroup(rank=rank % size, size=size, process_group=join_subgroup(groups, timeout_s))


@dataclass(kw_only=True, slots=True, frozen=True)
class RowPart:
    """The tokens of a row that a rank computes."""

    group: RankGroup
    num_tokens: int
    """Of the row as attention takes it, which may have padding of its own."""

    @property
    def size(self) -> int:
        """P: what each rank has."""
        return -(-self.num_tokens // self.group.size)

    def of(self, row: IndexArray, padding: int = 0) -> IndexArray:
        """This rank's part [P] of a row [up to T], which `padding` fills up."""
        whole = np.pad(row, (0, self.size * self.group.size - len(row)), constant_values=padding)
        return whole[own_tokens(self.group, self.size)]

    def to_heads(self, states: Tensor) -> Tensor:
        """[1, H, P, D] of this rank's tokens -> [1, H / S, num_tokens, D] of its heads.

        Heads of keys and values that S does not divide are repeated until it does: 2 twice for 4 ranks, and 6 too.
        """
        repeats = math.lcm(states.shape[1], self.group.size) // states.shape[1]
        states = states[0].transpose(0, 1)
        if repeats > 1:
            states = states.repeat_interleave(repeats, dim=1)
        whole = _exchange(states, self.group, to_heads=True)
        return whole[: self.num_tokens].transpose(0, 1)[None]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, num_tokens, H / S, D] of this rank's heads -> [1, P, H, D] of its tokens."""
        whole = states[0]
        if padding := self.size * self.group.size - self.num_tokens:
            whole = F.pad(whole, (0, 0, 0, 0, 0, padding))
        return _exchange(whole, self.group, to_heads=False)[None]


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    part: RowPart | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`packed_attention`; with `part`, of the tokens of a rank that shares rows with others: [1, heads, P, D] each."""
    if part is None:
        return packed_attention(module, query, key, value, attention_mask, s_aux=s_aux, **others)
    if query.shape[1] % part.group.size:
        raise ConfigError(
            f"trainer.sequence_parallel={part.group.size} does not divide the {query.shape[1]} attention heads of "
            f"{type(module).__name__}"
        )
    sinks = None if s_aux is None else part.group.slice(s_aux, 0)
    query, key, value = (part.to_heads(states) for states in (query, key, value))
    output, _ = packed_attention(module, query, key, value, attention_mask, s_aux=sinks, **others)
    return part.to_tokens(output), None


AttentionInterface.register(ATTENTION, shared_attention)


def own_tokens(group: RankGroup, size: int) -> slice:
    """The place of this rank's P = `size` tokens in the row."""
    return slice(group.rank * size, (group.rank + 1) * size)


def places_in(tokens: slice, positions: IndexArray) -> IndexArray:
    """Which of these tokens of the row, each given by its position in it, are among `tokens`."""
    return np.flatnonzero((positions >= tokens.start) & (positions < tokens.stop))


def gather(own: Tensor, places: Tensor, size: int, group: RankGroup) -> Tensor:
    """What the ranks have computed, each for its `places` of N = `size`, as [N, ...] on every rank."""
    return group.add_up(own.new_zeros(size, *own.shape[1:]).index_copy(0, places, own))


def _exchange(states: Tensor, group: RankGroup, *, to_heads: bool) -> Tensor:
    found: Tensor = _AllToAll.apply(states, group, to_heads)  # pyright: ignore[reportAssignmentType]
    return found


class _AllToAll(torch.autograd.Function):
    """Backward is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _all_to_all(states, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(gradients[0], ctx.group, not ctx.to_heads), None, None


def _all_to_all(states: Tensor, group: RankGroup, to_heads: bool) -> Tensor:
    """[P, H, D] -> [T, H / S, D], or back. One copy beside what is sent and received."""
    if to_heads:
        sent = states.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # [S, P, H / S, D]
    else:
        sent = states.unflatten(0, (group.size, -1)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)
