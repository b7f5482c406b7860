"""Who goes first: kept places, order, and what is taken out."""

from __future__ import annotations

import random
from functools import partial

from fakes import make_ready
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.config import Order
from rlflow.groups.ready import ReadyQueue
from rlflow.groups.staleness import admission_budget
from rlflow.types import ReadyGroup


def queue(order: Order = Order.oldest_first, max_versions: int = 1, groups_per_step: int = 2) -> ReadyQueue:
    return ReadyQueue(order=order, max_versions=max_versions, groups_per_step=groups_per_step)


def ids(ready: ReadyQueue, *, version: int, places: int) -> list[int]:
    return [group.group_id for group in ready.take(version=version, places=places)]


def test_the_oldest_policy_goes_first_then_the_oldest_group() -> None:
    ready = queue(max_versions=9)
    for group_id, version in ((4, 2), (3, 1), (2, 2), (9, 1)):
        ready.expect(group_id, version, was_late=False)
        ready.put(make_ready(group_id, version))
    assert [group.group_id for group in ready.groups] == [3, 9, 2, 4]
    assert ids(ready, version=2, places=3) == [3, 9, 2]
    assert ids(ready, version=2, places=3) == [4]
    assert (len(ready), ready.num_bytes) == (0, 0)


def test_a_place_is_kept_for_a_slow_group_in_the_last_update_that_may_use_it() -> None:
    ready = queue(max_versions=1, groups_per_step=2)
    ready.expect(1, 0, was_late=False)  # slow
    for group_id in (2, 3, 4):
        ready.expect(group_id, 0 if group_id == 2 else 1, was_late=False)
    for group_id in (2, 3, 4):
        ready.put(make_ready(group_id, 0 if group_id == 2 else 1))
    assert ids(ready, version=1, places=2) == [2]  # the other place of this update is the slow group's
    ready.put(make_ready(1, 0))
    assert ids(ready, version=1, places=1) == [1]
    assert ids(ready, version=2, places=2) == [3, 4]


def test_a_group_may_pass_a_slow_one_while_a_later_update_has_room_for_it() -> None:
    ready = queue(max_versions=1, groups_per_step=2)
    for group_id in (1, 2, 3):
        ready.expect(group_id, 0, was_late=False)
    ready.put(make_ready(2, 0))
    ready.put(make_ready(3, 0))
    assert ids(ready, version=0, places=2) == [2, 3]


def test_a_group_that_will_not_come_gives_its_place_back() -> None:
    ready = queue(max_versions=0, groups_per_step=1)
    ready.expect(1, 0, was_late=False)
    ready.expect(2, 1, was_late=False)
    ready.put(make_ready(2, 1))
    assert ids(ready, version=0, places=1) == []
    ready.forget(1)
    assert ids(ready, version=0, places=1) == [2]


def test_the_first_that_is_ready_goes_first_but_one_that_was_late_has_a_claim() -> None:
    ready = queue(Order.ready_first, max_versions=1, groups_per_step=1)
    ready.expect(1, 0, was_late=True)
    for group_id in (2, 3):
        ready.expect(group_id, 0, was_late=False)
    ready.put(make_ready(3, 1))
    ready.put(make_ready(2, 0))
    assert ids(ready, version=0, places=1) == [3]  # update 1 still has a place for group 1
    assert ids(ready, version=1, places=1) == []
    ready.put(make_ready(1, 0))
    assert ids(ready, version=1, places=1) == [1]
    assert ids(ready, version=2, places=1) == [2]


def test_removed_groups_take_their_claims_and_bytes_along() -> None:
    ready = queue(max_versions=0, groups_per_step=1)
    for group_id in (1, 2):
        ready.expect(group_id, group_id, was_late=False)
        ready.put(make_ready(group_id, group_id))
    assert [group.group_id for group in ready.remove(lambda group: group.oldest_version < 2)] == [1]
    assert (len(ready), ready.num_bytes) == (1, 100)
    assert ids(ready, version=2, places=1) == [2]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), max_versions=st.integers(0, 4), size=st.integers(1, 4))
def test_no_claim_is_ever_missed_and_the_queue_never_blocks_when_all_are_ready(
    seed: int, max_versions: int, size: int
) -> None:
    """Admission by budget, completion in any order, versions of the engines lagging behind at random."""
    rng = random.Random(seed)
    ready = queue(max_versions=max_versions, groups_per_step=size)
    running: dict[int, int] = {}
    last_id = trained = served = version = 0
    in_step = 0
    for _ in range(400):
        live = len(running) + len(ready) + in_step
        budget = admission_budget(
            served_step=served,
            num_steps=10**6,
            groups_per_step=size,
            max_versions=max_versions,
            num_trained=trained,
            num_live=live,
        )
        for _ in range(budget):
            last_id += 1
            running[last_id] = served
            ready.expect(last_id, served, was_late=False)
        done = [group_id for group_id in running if rng.random() < 0.3]
        for group_id in done:
            first = running.pop(group_id)
            if rng.random() < 0.1:
                ready.forget(group_id)
            else:
                ready.put(make_ready(group_id, rng.randint(first, served)))
        taken = ready.take(version=version, places=size - in_step)
        assert all(0 <= version - group.oldest_version <= max_versions for group in taken)
        assert taken or running or len(ready) == 0 or in_step == size or budget
        in_step += len(taken)
        if in_step == size:
            trained, version, in_step = trained + size, version + 1, 0
            served = version if max_versions == 0 else rng.randint(served, version)
    for group in ready.groups:
        assert version - group.oldest_version <= max_versions
    assert trained > 0


def is_older(version: int, group: ReadyGroup) -> bool:
    return group.oldest_version < version


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), max_versions=st.integers(1, 4), size=st.integers(1, 4), spare=st.integers(1, 4))
def test_spare_groups_never_make_a_claim_late(seed: int, max_versions: int, size: int, spare: int) -> None:
    """Tasks that were late are admitted within the bound, only new ones are spare, and late groups are dropped."""
    rng = random.Random(seed)
    ready = queue(Order.ready_first, max_versions=max_versions, groups_per_step=size)
    running: dict[int, int] = {}
    claims: set[int] = set()
    last_id = trained = served = version = in_step = put_back = 0
    for _ in range(400):
        while True:
            budget = admission_budget(
                served_step=served,
                num_steps=10**6,
                groups_per_step=size,
                max_versions=max_versions,
                num_trained=trained,
                num_live=len(running) + len(ready) + in_step,
                num_training=in_step,
                num_spare=0 if put_back else spare,
            )
            if not budget:
                break
            last_id += 1
            running[last_id] = served
            ready.expect(last_id, served, was_late=put_back > 0)
            if put_back:
                put_back -= 1
                claims.add(last_id)
        assert len(running) + len(ready) + in_step <= size * (max_versions + 1) + spare
        for group_id in [group_id for group_id in running if rng.random() < 0.3]:
            ready.put(make_ready(group_id, running.pop(group_id)))
        in_step += len(ready.take(version=version, places=size - in_step))
        if in_step < size:
            continue
        trained, version, in_step = trained + size, version + 1, 0
        served = rng.randint(served, version)
        oldest = version - max_versions
        late = [group.group_id for group in ready.remove(partial(is_older, oldest))]
        late += [group_id for group_id, first in running.items() if first < oldest]
        for group_id in late:
            assert group_id not in claims
            running.pop(group_id, None)
            ready.forget(group_id)
            put_back += 1
    assert trained > 0
