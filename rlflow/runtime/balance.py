"""Shares of equal cost. Pure."""

import heapq
from collections.abc import Sequence


def karmarkar_karp(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Rank -> indices of its items, ascending; the costliest rank first.

    Largest differencing (Karmarkar and Karp, 1982) for any number of ranks: each item begins as a partition of its own,
    with the item on one rank. The two partitions whose ranks differ most are merged, the costliest rank of one with the
    cheapest of the other, until one is left. No two ranks differ by more than the costliest item, so none exceeds the
    mean by more than (1 - 1 / num_ranks) times that.

    Raises ValueError for a negative cost and for fewer than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1; got {num_ranks}")
    if costs and min(costs) < 0:
        raise ValueError(f"costs must not be negative; got {min(costs)}")
    if not costs:
        return [[] for _ in range(num_ranks)]
    # Difference, first item (unique, so that nothing further is compared), ranks by falling load. Ranks without an item
    # come last and are left out: at first that is all of them but one.
    heap = [(-float(cost), index, [(float(cost), [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, ranks = heapq.heappop(heap)
        _, second, others = heapq.heappop(heap)
        both = max(0, len(ranks) + len(others) - num_ranks)
        alone, cheapest = ranks[: len(ranks) - both], ranks[len(ranks) - both :]
        merged = [
            *alone,
            *(
                (load + other_load, items + other_items)
                for (load, items), (other_load, other_items) in zip(cheapest, reversed(others), strict=False)
            ),
            *reversed(others[: len(others) - both]),
        ]
        merged.sort(key=_by_falling_load)
        least = merged[-1][0] if len(merged) == num_ranks else 0.0
        heapq.heappush(heap, (least - merged[0][0], min(first, second), merged))
    loads = heap[0][2]
    found = [sorted(items) for _, items in sorted(loads, key=lambda rank: (-rank[0], sorted(rank[1])))]
    return found + [[] for _ in range(num_ranks - len(found))]


def _by_falling_load(rank: tuple[float, list[int]]) -> float:
    return -rank[0]
