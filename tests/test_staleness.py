"""Admission and order, by literal cases and as properties."""

from __future__ import annotations

import pytest
from fakes import make_episode, make_tasks
from hypothesis import given
from hypothesis import strategies as st

from rlflow.sampler import TaskSampler
from rlflow.staleness import admission_budget, is_stale, take_order
from rlflow.types import ReadyGroup


@pytest.mark.parametrize(
    ("step", "max_versions", "num_trained", "num_live", "budget"),
    [
        (0, 0, 0, 0, 8),
        (0, 0, 0, 8, 0),
        (0, 0, 0, 7, 1),
        (3, 0, 24, 0, 8),
        (0, 1, 0, 8, 8),
        (3, 2, 24, 20, 4),
        (9, 0, 72, 0, 8),
        (9, 4, 72, 8, 0),
        (10, 0, 80, 0, 0),
    ],
)
def test_admission_budget(step: int, max_versions: int, num_trained: int, num_live: int, budget: int) -> None:
    found = admission_budget(
        step=step,
        num_steps=10,
        groups_per_step=8,
        max_versions=max_versions,
        num_trained=num_trained,
        num_live=num_live,
    )
    assert found == budget


def test_staleness_counts_versions_before_the_update() -> None:
    assert not is_stale(oldest_version=5, version=5, max_versions=0)
    assert is_stale(oldest_version=4, version=5, max_versions=0)
    assert not is_stale(oldest_version=4, version=5, max_versions=1)
    assert is_stale(oldest_version=3, version=5, max_versions=1)


def test_the_oldest_policy_goes_first_then_the_oldest_group() -> None:
    groups = [
        ReadyGroup(
            group_id=group_id,
            task_id="t",
            episodes=[make_episode(0.0, version), make_episode(1.0, version + 1)],
            payloads=[],
            advantages=[],
            references=None,
            num_bytes=0,
        )
        for group_id, version in ((4, 2), (3, 1), (2, 2), (9, 1))
    ]
    assert [group.group_id for group in take_order(groups)] == [3, 9, 2, 4]


def test_each_pass_offers_each_task_once_in_an_order_of_its_own() -> None:
    sampler = TaskSampler(make_tasks(20), seed=3)
    passes = [[sampler.next()[0].id for _ in range(20)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(f"t{i}" for i in range(20))
    assert passes[0] != passes[1]
    again = TaskSampler(make_tasks(20), seed=3)
    assert [again.next()[0].id for _ in range(20)] == passes[0]


@given(num_before=st.integers(0, 25), put_back=st.lists(st.integers(0, 6), max_size=4), num_after=st.integers(1, 20))
def test_a_restored_sampler_goes_on_as_the_first_would_have(
    num_before: int, put_back: list[int], num_after: int
) -> None:
    sampler = TaskSampler(make_tasks(7), seed=1)
    for _ in range(num_before):
        sampler.next()
    for number in put_back:
        sampler.put_back(f"t{number}", 0)
    restored = TaskSampler(make_tasks(7), seed=1)
    restored.restore(sampler.state)
    assert [restored.next() for _ in range(num_after)] == [sampler.next() for _ in range(num_after)]
