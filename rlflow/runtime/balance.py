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
    empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(num_ranks - 1)]
    # Difference, first item (unique, so that nothing further is compared), ranks by falling load.
    heap = [(-float(cost), index, [(float(cost), [index]), *empty]) for index, cost in enumerate(costs)]
    if not heap:
        return [[] for _ in range(num_ranks)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, ranks = heapq.heappop(heap)
        _, second, others = heapq.heappop(heap)
        merged = [
            (load + other_load, items + other_items)
            for (load, items), (other_load, other_items) in zip(ranks, reversed(others), strict=True)
        ]
        merged.sort(key=lambda rank: -rank[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    loads = heap[0][2]
    return [sorted(items) for _, items in sorted(loads, key=lambda rank: (-rank[0], sorted(rank[1])))]
