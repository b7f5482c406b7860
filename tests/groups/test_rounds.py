"""Rounds with spare groups: which groups are cancelled, and when their tasks come again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from fakes import World, make_tasks, make_world, run_virtually

from rlflow.config import Config, Order
from rlflow.groups.ledger import DropReason
from rlflow.groups.rounds import Rounds, num_spare
from rlflow.groups.sampler import TaskSampler


@pytest.mark.parametrize(
    ("wanted", "oversample", "spare"), [(8, 1.0, 0), (8, 1.25, 2), (8, 1.01, 1), (10, 1.1, 1), (3, 2.0, 3)]
)
def test_spare_groups_are_rounded_up(wanted: int, oversample: float, spare: int) -> None:
    assert num_spare(wanted, oversample) == spare


def rounds_of(oversample: float, max_versions: int = 0) -> Rounds:
    config = Config()
    config.algorithm.groups_per_step, config.rollout.oversample = 2, oversample
    config.staleness.max_versions = max_versions
    return Rounds(config)


def test_deferred_tasks_come_again_when_they_fill_a_step_and_then_nothing_is_spare() -> None:
    sampler, rounds = TaskSampler(make_tasks(9), seed=0), rounds_of(1.5)
    sampler.defer("t7", 0)
    rounds.begin(0, sampler)
    assert (sampler.num_put_back, rounds.spare_now(sampler)) == (0, 1)
    sampler.defer("t3", 1)
    rounds.begin(0, sampler)  # the step goes on as it has begun
    assert sampler.num_put_back == 0
    rounds.begin(1, sampler)
    assert [(task.id, task_pass) for task, task_pass in (sampler.next(), sampler.next())] == [("t7", 0), ("t3", 1)]
    assert rounds.spare_now(sampler) == 0
    rounds.begin(2, sampler)
    assert rounds.spare_now(sampler) == 1


def test_a_long_round_has_no_more_groups_than_a_step() -> None:
    sampler, rounds = TaskSampler(make_tasks(9), seed=0), rounds_of(1.5)
    sampler.put_back("t1", 0)
    for task_id in ("t2", "t3"):
        sampler.defer(task_id, 0)
    rounds.begin(0, sampler)
    assert (sampler.state.put_back, sampler.state.deferred) == ([("t1", 0), ("t2", 0)], [("t3", 0)])


def test_a_run_that_resumes_in_a_long_round_goes_on_with_it() -> None:
    sampler, rounds = TaskSampler(make_tasks(9), seed=0), rounds_of(1.5)
    for task_id in ("t1", "t2"):
        sampler.put_back(task_id, 0)
    rounds.begin(5, sampler)
    assert [sampler.next()[0].id for _ in range(2)] == ["t1", "t2"]
    assert rounds.spare_now(sampler) == 0


def test_a_task_that_was_put_back_is_no_spare_one() -> None:
    sampler, rounds = TaskSampler(make_tasks(9), seed=0), rounds_of(1.5, max_versions=2)
    sampler.put_back("t1", 0)
    assert rounds.spare_now(sampler) == 0
    sampler.next()
    assert rounds.spare_now(sampler) == 1


@pytest.mark.parametrize(("oversample", "max_versions"), [(1.0, 0), (1.5, 1)])
def test_a_run_without_rounds_plays_what_one_with_rounds_has_deferred(oversample: float, max_versions: int) -> None:
    sampler, rounds = TaskSampler(make_tasks(9), seed=0), rounds_of(oversample, max_versions)
    for task_id in ("t1", "t2", "t3"):
        sampler.defer(task_id, 0)
    rounds.begin(0, sampler)
    assert [sampler.next()[0].id, sampler.next()[0].id] == ["t1", "t2"]
    rounds.begin(1, sampler)
    assert sampler.next()[0].id == "t3"


def slow_first_of_each_round(folder: Path, *, steps: int = 4, resumed: World | None = None) -> World:
    """Steps of three groups with a spare one: the first task of each short round takes a minute, always."""
    config = Config()
    config.rollout.oversample = 1.25
    world = make_world(folder, steps=steps, num_tasks=12, config=config, ledger=folder / "ledger.db")
    slow = set[str]() if resumed is None else {order.task.id for order in resumed.runners.orders[::4]}

    def seconds(_: object) -> float:
        orders = world.runners.orders
        if resumed is None and len(orders) in (1, 5, 9):
            slow.add(orders[-1].task.id)
        return 60.0 if orders[-1].task.id in slow else 1.0

    world.runners.duration_s = seconds
    return world


def test_slow_groups_are_cancelled_and_played_together_so_that_each_task_is_trained_once(tmp_path: Path) -> None:
    world = slow_first_of_each_round(tmp_path)
    run_virtually(world.driver.run())
    orders = [order.task.id for order in world.runners.orders]
    slow = [orders[0], orders[4], orders[8]]
    assert len(orders) == 15 and orders[12:] == slow
    assert [drop[1] for drop in world.observer.drops] == [DropReason.SLOW] * 3
    assert world.observer.drops[0] == (1, DropReason.SLOW, "the step was full without it")
    counts = world.ledger.counts()
    assert (counts["trained"], counts["dropped_slow"], counts["admitted_total"]) == (12, 3, 15)
    assert sorted(world.trainer.trained) == sorted(task.id for task in make_tasks(12))
    assert world.runners.most_playing == 4 and set(world.trainer.staleness) == {0}
    lengths_s = [report.end_s - report.start_s for report in world.observer.reports]
    assert [length_s > 60 for length_s in lengths_s] == [False, False, False, True]  # on the virtual clock


def test_what_was_deferred_is_in_the_checkpoint(tmp_path: Path) -> None:
    first = slow_first_of_each_round(tmp_path, steps=3)
    first.config.run.checkpoint_every = 3
    run_virtually(first.driver.run())
    first.ledger.close()
    found = first.checkpoints.newest_whole()
    assert found is not None
    slow = [order.task.id for order in first.runners.orders[::4]]
    assert found.state.sampler.deferred == [(task_id, 0) for task_id in slow]
    shutil.copy(found.folder / "ledger.db", tmp_path / "ledger.db")
    second = slow_first_of_each_round(tmp_path, resumed=first)

    async def go() -> None:
        await second.driver.restore(found.folder, found.state)
        await second.driver.run()

    run_virtually(go())
    assert [order.task.id for order in second.runners.orders] == slow
    assert sorted(second.trainer.trained) == sorted(task.id for task in make_tasks(12))


def test_dynamic_sampling_fills_the_places_of_groups_without_signal(tmp_path: Path) -> None:
    """Three of the four groups of the first step have nothing to compare; none of them is among the slow."""
    world = slow_first_of_each_round(tmp_path, steps=1)
    world.config.algorithm.dynamic_sampling = True
    played = world.runners.outcome
    world.runners.outcome = lambda order, index: (
        (1.0, played(order, index)[1]) if 2 <= order.group_id <= 4 else played(order, index)
    )
    run_virtually(world.driver.run())
    counts = world.ledger.counts()
    assert (counts["trained"], counts["dropped_filtered"], counts["dropped_slow"]) == (3, 3, 1)
    assert world.runners.most_playing == 4


def test_an_asynchronous_run_has_spare_groups_under_way_and_keeps_its_bound(tmp_path: Path) -> None:
    def most_playing(oversample: float) -> int:
        config = Config()
        config.rollout.oversample, config.staleness.order = oversample, Order.ready_first
        folder = tmp_path / str(oversample)
        world = make_world(folder, steps=12, max_versions=1, num_tasks=60, config=config)
        world.runners.duration_s = lambda rng: 30.0 if len(world.runners.orders) % 5 == 0 else 0.5
        run_virtually(world.driver.run())
        counts = world.ledger.counts()
        assert counts["trained"] == 36 and counts["dropped_slow"] == 0 and counts["dropped_stale"] > 0
        assert all(0 <= lag <= 1 for lag in world.trainer.staleness)
        return world.runners.most_playing

    assert (most_playing(1.0), most_playing(2.0)) == (6, 9)


def test_a_group_that_is_cancelled_before_it_begins_leaves_nothing_behind(tmp_path: Path) -> None:
    config = Config()
    config.rollout.oversample = 2.0
    world = make_world(tmp_path, config=config)
    intake = world.driver._intake

    async def go() -> None:
        intake.admit()
        assert len(intake._tasks) == 6
        intake._end_the_slow()
        assert world.ledger.num_live == 0
        for _ in range(3):
            await asyncio.sleep(0)

    run_virtually(go())
    assert (intake._tasks, world.runners.orders, intake.sampler.num_deferred) == ({}, [], 6)
