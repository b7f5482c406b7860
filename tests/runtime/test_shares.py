"""Items shared out to ranks, against what can be proven and against a search of all ways."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.runtime.balance import karmarkar_karp


def test_the_difference_is_taken_again_and_again() -> None:
    # 8 | 7 and 6 | 5 differ by 1 each; 4 joins the 7: 11 | 8; then 11 + 5 | 8 + 6. Largest first would give 17 | 13.
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


def test_three_ranks() -> None:
    assert karmarkar_karp([9, 8, 7, 6, 5, 4], 3) == [[0, 5], [1, 4], [2, 3]]


def test_more_ranks_than_items() -> None:
    assert karmarkar_karp([3, 5], 3) == [[1], [0], []]


def test_no_items() -> None:
    assert karmarkar_karp([], 2) == [[], []]


def test_one_rank_gets_all() -> None:
    assert karmarkar_karp([1, 5, 3], 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("costs", "num_ranks", "message"),
    [([1], 0, "num_ranks must be at least 1; got 0"), ([1, -2], 2, "costs must not be negative; got -2")],
)
def test_refused(costs: list[float], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        karmarkar_karp(costs, num_ranks)


COSTS = st.lists(st.integers(0, 1000), max_size=40)


@given(costs=COSTS, num_ranks=st.integers(1, 9))
def test_every_item_once_and_no_rank_above_the_bound(costs: list[int], num_ranks: int) -> None:
    ranks = karmarkar_karp(costs, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(index for items in ranks for index in items) == list(range(len(costs)))
    loads = [sum(costs[index] for index in items) for items in ranks]
    assert loads == sorted(loads, reverse=True)
    # What list scheduling guarantees, times num_ranks: max <= mean + (1 - 1 / num_ranks) largest.
    assert loads[0] * num_ranks <= sum(costs) + (num_ranks - 1) * max(costs, default=0)


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_ranks=st.integers(2, 3))
def test_at_most_four_thirds_of_the_best_there_is(costs: list[int], num_ranks: int) -> None:
    """The bound that largest-first scheduling has, which differencing has too (Michiels et al. 2003)."""
    found = max(sum(costs[index] for index in items) for items in karmarkar_karp(costs, num_ranks))
    best = min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == each) for each in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(costs))
    )
    assert 3 * found <= 4 * best
