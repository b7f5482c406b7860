"""What a rank is sent of the groups that are trained: the episodes of its own micro-batches, and no others. Pure.

    groups, plan_micro_batches -> share_of -> the Share of one rank

What the driver sends then grows with the episodes, and not with the episodes times the ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlflow.batching.plan import BatchPiece, MicroBatchPlan, plan_micro_batches
from rlflow.types import ReadyGroup

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class Share:
    """Micro-batches of one rank, with the groups that they are cut from.

    Example: groups A and B of two episodes each, of which a rank has the last of A and all of B -> groups (A with its
    last episode, B), plans ((group 0, episode 0), (group 1, episodes 0 and 1))
    """

    groups: tuple[ReadyGroup, ...] = ()
    """Those that the rank has episodes of, with these episodes alone."""
    plans: tuple[MicroBatchPlan, ...] = ()
    """The pieces count groups and episodes as `groups` does."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankWork:
    """What one rank does to accumulate the gradients of some groups."""

    trained: Share
    observed: Share
    """Of groups without a gradient, which go through the model for the metrics."""
    passed_over: Share
    """Of groups without a gradient, which are counted and not computed."""
    num_groups: int
    """Of all ranks, like `num_tokens`."""
    num_tokens: int


def share_of(groups: Sequence[ReadyGroup], plans: Sequence[MicroBatchPlan]) -> Share:
    """The part of `groups` that the micro-batches of one rank have."""
    taken: defaultdict[int, list[int]] = defaultdict(list)
    pieces: list[MicroBatchPlan] = []
    numbers: dict[int, int] = {}
    for plan in plans:
        found = []
        for piece in plan.pieces:
            number, first = numbers.setdefault(piece.group, len(numbers)), len(taken[piece.group])
            taken[piece.group] += piece.episodes
            found.append(BatchPiece(group=number, episodes=tuple(range(first, first + len(piece.episodes)))))
        pieces.append(MicroBatchPlan(pieces=tuple(found)))
    return Share(groups=tuple(_only(groups[index], found) for index, found in taken.items()), plans=tuple(pieces))


def shares(groups: Sequence[ReadyGroup], num_shares: int, micro_batch_tokens: int) -> list[Share]:
    """The share of each rank; without groups there are no micro-batches."""
    if not groups:
        return [Share()] * num_shares
    plans = plan_micro_batches([group.episodes for group in groups], num_shares, micro_batch_tokens)
    return [share_of(groups, each) for each in plans]


def _only(group: ReadyGroup, episodes: Sequence[int]) -> ReadyGroup:
    """The group with these of its episodes."""

    def picked(row: list[T]) -> list[T]:
        return [row[index] for index in episodes] if row else row

    return replace(
        group,
        episodes=picked(group.episodes),
        payloads=picked(group.payloads),
        advantages=picked(group.advantages),
        frozen={name: picked(handles) for name, handles in group.frozen.items()},
        values=None if group.values is None else picked(group.values),
        log_ratios=picked(group.log_ratios),
    )
