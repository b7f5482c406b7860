"""The driver on a virtual clock: conservation, staleness, failures, stop, save and resume."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import shutil
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from fakes import World, make_tasks, make_world, run_virtually
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.algorithms.registry import check_functions
from rlflow.config import Config, Late, Order, Placement
from rlflow.driver import StepReport
from rlflow.errors import ConfigError, DeadlineError, EngineLost, PayloadLost, RunError, WorkerError, WorkerLost
from rlflow.groups.evaluation import HeldOut
from rlflow.groups.ledger import DropReason, GroupState, Ledger, counts_by_state
from rlflow.groups.rounds import num_spare
from rlflow.groups.sampler import TaskSampler
from rlflow.roles import StepOutcome
from rlflow.rundir.store import RunState, read_state
from rlflow.settings.checks import check
from rlflow.telemetry.record import step_record
from rlflow.types import EpisodeEnd, GroupOrder, PayloadRef, PlayedGroup, ReadyGroup, Sample, Span


def assert_conserved(world: World) -> None:
    counts = world.ledger.counts()
    total = counts.pop("admitted_total")
    assert sum(counts.values()) == total == len(world.runners.orders) + counts["admitted"]


def test_a_synchronous_run_trains_each_batch_at_its_own_version(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=5)
    run_virtually(world.driver.run())
    assert world.trainer.version == 5
    assert world.engines.loaded == [0, 1, 2, 3, 4, 5]
    assert set(world.trainer.staleness) == {0}
    assert world.runners.most_playing == 3
    assert len(world.runners.orders) == 15
    assert world.ledger.counts() == {
        "admitted": 0, "running": 0, "scored": 0, "ready": 0, "training": 0, "trained": 15,
        "dropped_stale": 0, "dropped_filtered": 0, "dropped_no_verdict": 0, "dropped_failed": 0, "dropped_cancelled": 0,
        "dropped_slow": 0,
        "admitted_total": 15,
    }  # fmt: skip
    assert world.observer.saves == ["step_5"]


def test_no_more_groups_start_while_replies_wait_for_room_in_the_engines(tmp_path: Path) -> None:
    most = []
    for crowded_share in (0.0, 0.9):
        world = make_world(tmp_path / str(crowded_share), steps=20, max_versions=4, num_tasks=200)
        world.runners.crowded_share = crowded_share
        run_virtually(world.driver.run())
        assert world.trainer.version == 20
        most.append(world.runners.most_playing)
    assert most[0] > 6 >= most[1]


def test_one_version_of_staleness_overlaps_and_keeps_the_bound(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=20, max_versions=1, num_tasks=200)
    run_virtually(world.driver.run())
    assert world.trainer.version == 20
    assert set(world.trainer.staleness) == {0, 1}
    assert 3 < world.runners.most_playing <= 6
    assert_conserved(world)
    assert world.ledger.num_live == 0


def test_a_profile_begins_and_ends_between_steps(tmp_path: Path) -> None:
    """Also one of the last steps, and one whose run is stopped in its middle."""
    for number, (steps, stop_at, expected) in enumerate(
        (
            ([2, 3], None, [(True, 1), (False, 3)]),
            ([4, 4], None, [(True, 3), (False, 4)]),
            ([2, 4], 2, [(True, 1), (False, 2)]),
        )
    ):
        world = make_world(tmp_path / str(number), steps=4)
        world.config.run.profile_steps = steps
        seen: list[tuple[bool, int]] = []

        async def profile(is_on: bool, world: World = world, seen: list[tuple[bool, int]] = seen) -> None:
            seen.append((is_on, world.trainer.steps))

        world.driver._workers.profile = profile
        world.observer.on_step = lambda report, world=world, stop_at=stop_at: (
            world.driver.request_stop() if report.step == stop_at else None
        )
        run_virtually(world.driver.run())
        assert seen == expected


@pytest.mark.parametrize(
    ("ranks", "micro_batch_tokens", "passes"),
    [
        (2, 1000, [1, 1, 1]),  # as they come
        (4, 22, [2, 1]),  # 22 tokens are worth it: two groups of 11
        (4, 1000, [3]),  # all of the step
    ],
)
def test_groups_wait_until_a_pass_over_many_ranks_pays(
    ranks: int, micro_batch_tokens: int, passes: list[int], tmp_path: Path
) -> None:
    world = make_world(tmp_path, steps=1)
    world.config.trainer.ranks, world.config.trainer.micro_batch_tokens = ranks, micro_batch_tokens
    accumulate, sizes = world.trainer.accumulate, list[int]()

    async def counted(groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        assert all(group.num_tokens == 11 for group in groups)
        sizes.append(len(groups))
        return await accumulate(groups, oldest_version)

    world.trainer.accumulate = counted
    run_virtually(world.driver.run())
    assert sizes == passes


def test_each_task_is_trained_once_a_pass(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=8, num_tasks=12)
    run_virtually(world.driver.run())
    assert Counter(world.trainer.trained) == Counter({f"t{i}": 2 for i in range(12)})


def test_failed_episodes_are_left_out_of_the_statistics(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=1)

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if index == 3:
            return None, EpisodeEnd.REWARD_ERROR
        return (1.0, EpisodeEnd.COMPLETED) if index == 0 else (0.0, EpisodeEnd.COMPLETED)

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    group = world.observer.reports[0].groups[0]
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0, 0.0]
    assert sum(value for values in group.advantages for value in values or []) == pytest.approx(0.0, abs=1e-6)
    assert len(world.observer.reports[0].episodes) == 12


def test_a_group_without_verdicts_is_dropped_for_good_and_replaced(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=2, num_tasks=10)
    bad = {"t3", "t4"}

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if order.task.id in bad:
            return None, EpisodeEnd.PROMPT_TOO_LONG
        return float(index % 2), EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    assert world.trainer.version == 2
    assert not bad & set(world.trainer.trained)
    assert world.ledger.counts()["dropped_no_verdict"] == sum(order.task.id in bad for order in world.runners.orders)
    assert_conserved(world)


def test_a_lost_group_is_played_again_and_given_up_after_three_failures(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=4, num_tasks=14)
    failures: Counter[str] = Counter()

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if order.task.id == "t1" or (order.task.id == "t2" and not failures["t2"]):
            failures[order.task.id] += 1
            raise WorkerError("the runner died")
        return float(index % 2), EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    assert failures == {"t1": 3, "t2": 1}
    assert sorted(world.trainer.trained).count("t2") == 1
    assert world.ledger.counts()["dropped_failed"] == 4
    assert_conserved(world)


async def run_and_die(world: World, deaths: int, error: Exception) -> None:
    """The only runner dies so many times, with six groups each, before any of them ends."""
    world.runners.duration_s = lambda rng: rng.uniform(5.0, 6.0)
    running = asyncio.create_task(world.driver.run())
    for _ in range(deaths):
        await asyncio.sleep(2.0)
        assert len(world.runners.started) == 6
        world.runners.lose_all(error)
    await running


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("the episode runner died"),
        EngineLost("no token came"),
        DeadlineError("a reply", 300.0),
    ],
)
def test_what_one_process_takes_along_counts_as_one_failure(error: Exception, tmp_path: Path) -> None:
    world = make_world(tmp_path, max_versions=1)
    run_virtually(run_and_die(world, 15, error))
    assert world.trainer.version == 4
    assert world.ledger.counts()["dropped_failed"] == 15 * 6
    assert_conserved(world)


def test_a_runner_that_dies_for_ever_ends_the_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, max_versions=1)
    with pytest.raises(RunError, match="^16 groups in a row gave nothing to train on; .*the episode runner died"):
        run_virtually(run_and_die(world, 16, WorkerLost("the episode runner died")))
    assert world.trainer.version == 0
    assert_conserved(world)


def test_a_group_whose_payloads_are_lost_is_played_again(tmp_path: Path) -> None:
    """Of the groups that are ready after the second step, one has lost a payload; a checkpoint is due then."""
    world = make_world(tmp_path, steps=6, max_versions=2, num_tasks=18)
    world.config.run.checkpoint_every = 3
    lost: list[ReadyGroup] = []

    def on_step(report: StepReport) -> None:
        waiting = world.driver._intake.ready.groups
        if report.step >= 2 and waiting and not lost:
            lost.append(waiting[-1])
            world.runners.lost.add(waiting[-1].payloads[1])

    world.observer.on_step = on_step
    run_virtually(world.driver.run())
    (group,) = lost
    reason = (DropReason.FAILED, "its episodes were stored on a machine that is lost")
    assert (group.group_id, *reason) in world.observer.drops
    assert sorted(world.trainer.trained) == sorted(f"t{index}" for index in range(18))
    assert world.ledger.counts()["dropped_failed"] == 1
    assert_conserved(world)


def test_a_lost_group_is_in_no_checkpoint(tmp_path: Path) -> None:
    """During each step, what waits for the next one is lost."""
    world = make_world(tmp_path, steps=4, max_versions=2)
    world.config.run.checkpoint_every = 1
    step, lost = world.trainer.step, list[int]()

    async def lose_and_step(*, is_last: bool) -> StepOutcome:
        for group in world.driver._intake.ready.groups:
            world.runners.lost.update(group.payloads)
            lost.append(group.group_id)
        return await step(is_last=is_last)

    world.trainer.step = lose_and_step
    run_virtually(world.driver.run())
    assert lost
    assert [drop[0] for drop in world.observer.drops] == lost
    assert_conserved(world)


def test_a_trainer_that_is_lost_is_not_asked_to_save(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=4)

    async def lost(groups: object, oldest_version: int | None) -> list[Span]:
        raise WorkerLost("the trainer rank 0 died")

    world.trainer.accumulate = lost
    with pytest.raises(WorkerLost, match="^the trainer rank 0 died$") as caught:
        run_virtually(world.driver.run())
    assert "snapshot" not in world.trainer.log
    assert not hasattr(caught.value, "__notes__")


def test_a_trainer_that_is_well_is_saved_when_what_it_was_to_read_is_lost(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=4)
    accumulate = world.trainer.accumulate

    async def lost(groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        if world.trainer.version == 2:
            raise PayloadLost("what the trainer was to read is lost")
        return await accumulate(groups, oldest_version)

    world.trainer.accumulate = lost
    with pytest.raises(PayloadLost):
        run_virtually(world.driver.run())
    assert world.observer.saves == ["step_2"]


def test_a_trainer_that_waits_for_the_rank_that_failed_is_left_after_two_minutes(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=4)

    async def lost(groups: object, oldest_version: int | None) -> list[Span]:
        raise PayloadLost("what the trainer was to read is lost")

    world.trainer.accumulate = lost
    world.trainer.snapshot = lambda: asyncio.sleep(1e9)
    with pytest.raises(PayloadLost) as caught:
        run_virtually(world.driver.run())
    (note,) = caught.value.__notes__
    assert "copying the trainer's state did not finish within its deadline of 120 s" in note


def lose_while_saving(world: World, times: int) -> None:
    """Once or twice, a machine with a ready group is lost while payloads are written."""
    save = world.runners.save_payloads
    errors = [WorkerLost("the episode runner died"), PayloadLost("a payload is lost")][:times]

    async def lose(payloads: Sequence[PayloadRef], path: Path) -> str:
        await asyncio.sleep(0.1)
        if errors:
            world.runners.lost.add(payloads[0])
            raise errors.pop(0)
        return await save(payloads, path)

    world.runners.save_payloads = lose


def test_a_checkpoint_whose_groups_are_lost_is_given_up_and_the_next_one_comes(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=6, max_versions=2)
    world.config.run.checkpoint_every = 2
    lose_while_saving(world, 1)
    run_virtually(world.driver.run())
    assert world.observer.given_ups == [(2, "the episode runner died")]
    assert world.observer.saves == ["step_4", "step_6"]
    assert_conserved(world)


@pytest.mark.parametrize("times", [1, 2])
def test_the_last_checkpoint_is_taken_twice_at_most(tmp_path: Path, times: int) -> None:
    """Of a run that is stopped, which therefore has ready groups to save."""
    world = make_world(tmp_path, steps=50, max_versions=3)
    world.runners.duration_s = lambda rng: 0.2
    world.observer.on_step = lambda report: world.driver.request_stop() if report.step == 3 else None
    lose_while_saving(world, times)
    expected = nullcontext() if times == 1 else pytest.raises(WorkerLost, match="^ready groups were lost, twice, while")
    with expected:
        run_virtually(world.driver.run())
    assert world.observer.saves == ["step_3"][times - 1 :]
    assert world.observer.given_ups == [(3, "the episode runner died"), (3, "a payload is lost")][:times]


def test_a_run_in_which_nothing_works_stops_with_the_reason(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.runners.outcome = lambda order, index: (None, EpisodeEnd.REWARD_TIMEOUT)
    with pytest.raises(RunError, match="16 groups in a row gave nothing.*reward_timeout"):
        run_virtually(world.driver.run())
    assert_conserved(world)


def test_a_group_that_never_ends_is_dropped_at_its_deadline(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=2)
    slow = iter([1e9])
    world.runners.duration_s = lambda rng: next(slow, 1.0)
    run_virtually(world.driver.run())
    assert world.trainer.version == 2
    drops = [drop for drop in world.observer.drops if drop[1] is DropReason.FAILED]
    assert len(drops) == 1
    assert "playing group 1 (task" in drops[0][2] and "deadline of 900 s" in drops[0][2]


def test_gradients_that_are_not_finite_skip_the_update_and_three_stop_the_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=4)
    world.trainer.not_finite = {1}
    run_virtually(world.driver.run())
    assert world.trainer.version == 3
    assert world.engines.loaded == [0, 1, 2, 3]
    assert [report.outcome.applied for report in world.observer.reports] == [True, False, True, True]

    broken = make_world(tmp_path / "broken", steps=9)
    broken.trainer.not_finite = {2, 3, 4}
    with pytest.raises(RunError, match="not finite 3 times in a row"):
        run_virtually(broken.driver.run())


def test_a_stop_request_finishes_the_step_and_saves(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=50, max_versions=1)
    world.observer.on_step = lambda report: world.driver.request_stop() if report.step == 3 else None
    run_virtually(world.driver.run())
    assert world.trainer.version == 3
    assert world.observer.saves == ["step_3"]
    assert_conserved(world)
    assert {drop[1] for drop in world.observer.drops} <= {DropReason.CANCELLED}


def test_a_failed_run_keeps_the_steps_since_its_last_checkpoint(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9)
    world.trainer.dies_at = 6
    with pytest.raises(RunError, match="the trainer died"):
        run_virtually(world.driver.run())
    (step,) = world.checkpoints.steps()
    assert step == world.observer.reports[-1].step
    saved = Ledger(world.checkpoints.path(step) / "ledger.db")
    assert saved.num_live == 0
    assert saved.num_trained == 3 * step


@st.composite
def settings_of_runs(draw: st.DrawFn) -> Config:
    """Every combination of the scheduler's settings that `check` lets through."""
    config = Config()
    config.staleness.max_versions = draw(st.integers(0, 3))
    config.trainer.streaming = draw(st.sampled_from([None, False]))
    config.eval.every = draw(st.sampled_from([0, 0, 3]))
    if config.staleness.max_versions:
        config.staleness.order = draw(st.sampled_from(Order))
    if config.staleness.order is Order.ready_first:
        config.staleness.late = draw(st.sampled_from([Late.requeue, Late.mask]))
    if config.trainer.streaming is None:
        config.cluster.placement = draw(st.sampled_from(Placement))
        config.algorithm.advantage = draw(st.sampled_from(["grpo", "reinforce_pp_baseline"]))
        config.algorithm.groups_per_step = 3  # as in the worlds
        config.algorithm.epochs = draw(st.sampled_from([1, 1, 2]))
        config.algorithm.minibatches = draw(st.sampled_from([1, 1, 3]))
    config.algorithm.dynamic_sampling = draw(st.booleans())
    if not config.staleness.max_versions or config.staleness.order is Order.ready_first:
        config.rollout.oversample = draw(st.sampled_from([1.0, 1.25, 2.0]))
    config.rollout.oversample_episodes = draw(st.sampled_from([1.0, 1.5]))
    config.curriculum.kind = draw(st.sampled_from(["uniform", "uniform", "difficulty"]))
    check(config)
    check_functions(config)
    return config


@settings(deadline=None)
@given(
    config=settings_of_runs(),
    seed=st.integers(0, 2**31),
    stop_at=st.lists(st.integers(1, 11), max_size=3),
    failing=st.floats(0.0, 0.3),
    load_s=st.floats(0.0, 3.0),
    tail=st.floats(0.0, 2.0),
)
def test_stopped_and_resumed_runs_conserve_every_task(
    tmp_path_factory: pytest.TempPathFactory,
    config: Config,
    seed: int,
    stop_at: list[int],
    failing: float,
    load_s: float,
    tail: float,
) -> None:
    """Random latencies, failures and kills: the ledger adds up, staleness is hard, each task is trained once a pass."""
    max_versions = config.staleness.max_versions
    folder = tmp_path_factory.mktemp("run")
    steps, num_tasks, ledger = 12, 9, folder / "ledger.db"
    kills = [*sorted(stop_at), None]
    world, begun = make_world(folder), [0]
    for attempt, kill in enumerate(kills):
        world = make_world(
            folder,
            steps=steps,
            max_versions=max_versions,
            num_tasks=num_tasks,
            seed=seed + attempt,
            ledger=ledger,
            config=config,
        )
        world.config.run.checkpoint_every = 2
        world.engines.load_s = load_s
        world.runners.duration_s = lambda rng: rng.lognormvariate(0.0, tail)
        # The same order of tasks in each attempt, other latencies.
        world.driver._intake.sampler = TaskSampler(make_tasks(num_tasks), seed, config.curriculum)

        def outcome(order: GroupOrder, index: int, world: World = world) -> tuple[float | None, EpisodeEnd]:
            if index == 0 and world.runners.rng.random() < failing:
                raise WorkerError("made to fail")
            is_easy = order.task.id in ("t1", "t2")
            return 1.0 if is_easy else float(index % 2), EpisodeEnd.COMPLETED

        world.runners.outcome = outcome

        class Killed(BaseException):
            pass

        def on_step(report: object, kill: int | None = kill, world: World = world) -> None:
            if world.observer.reports[-1].step == kill:
                raise Killed

        world.observer.on_step = on_step

        async def go(world: World = world) -> None:
            found = world.checkpoints.newest_whole()
            if found:
                begun.append(found.state.step)
                await world.driver.restore(found.folder, found.state)
            await world.driver.run()

        try:
            run_virtually(go())
        except Killed:
            pass
        except RunError as error:
            assert "in a row" in str(error)
        assert all(0 <= lag <= max_versions for lag in world.trainer.staleness)
        spare = num_spare(3, config.rollout.oversample)
        assert world.runners.most_playing <= 3 * (max_versions + 1) + spare
        assert world.observer.most_ready <= 3 * (max_versions + 1) + spare
        if config.algorithm.dynamic_sampling:
            assert not {"t1", "t2"} & set(world.trainer.trained)
        if config.staleness.order is Order.oldest_first:
            assert DropReason.STALE not in {drop[1] for drop in world.observer.drops}
        assert all(each.step % 3 == 0 or each.step in (*begun, steps) for each in world.observer.evaluations)
        if kill is not None and world.trainer.version < steps:
            world.ledger.close()
            found = world.checkpoints.newest_whole()
            for left_over in folder.glob("ledger.db*"):
                left_over.unlink()
            if found:
                shutil.copy(found.folder / "ledger.db", ledger)
            else:
                world.trainer.trained.clear()
    final = world
    assert final.ledger.num_live == 0
    counts = final.ledger.counts()
    total = counts.pop("admitted_total")
    assert sum(counts.values()) == total
    assert counts["trained"] == len(final.trainer.trained) == steps * 3
    per_task = Counter(final.trainer.trained)
    passes = -(-steps * 3 // (num_tasks - 2 if config.algorithm.dynamic_sampling else num_tasks))
    if config.curriculum.kind == "uniform":
        assert all(count <= passes + 1 for count in per_task.values())
    rows = final.ledger._database.execute(
        "SELECT task, pass, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY task, pass"
    ).fetchall()
    assert all(count == 1 for _, _, count in rows)
    assert not final.driver._intake._tasks
    sampler = final.driver._intake.sampler.state
    assert sorted([*sampler.put_back, *sampler.deferred]) == open_passes(final.ledger)


def open_passes(ledger: Ledger) -> list[tuple[str, int]]:
    """(task, pass) of what was begun, and has neither been trained nor dropped for good."""
    rows = ledger._database.execute(
        "SELECT task, pass FROM groups GROUP BY task, pass HAVING SUM(state = 'trained') = 0 "
        "AND COALESCE(SUM(reason IN ('filtered', 'no_verdict')), 0) = 0 AND COALESCE(SUM(reason = 'failed'), 0) < 3"
    )
    return sorted((task, task_pass) for task, task_pass in rows)


class Sealed:
    """A payload handle that nobody may open."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"the driver looked at {name} of a payload")

    def __reduce_ex__(self, protocol: object) -> str:
        raise AssertionError("the driver copied a payload")


def test_the_driver_never_opens_a_payload(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=3, max_versions=1)
    play = world.runners.play

    async def sealed(order: GroupOrder) -> PlayedGroup:
        played = await play(order)
        played.payloads, played.pictures = [Sealed() for _ in played.payloads], Sealed()
        return played

    world.driver._workers.runners.play = sealed  # type: ignore[method-assign]
    run_virtually(world.driver.run())
    assert world.trainer.version == 3
    assert all(type(shown.payload) is Sealed for report in world.observer.reports for shown in report.shown)


def test_the_driver_does_not_grow_with_the_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=700, max_versions=2, num_tasks=20)
    sizes: dict[int, int] = {}

    def forget(report: StepReport) -> None:
        """Drop what the fakes remember, so that only the driver is measured."""
        observer, runners, trainer = world.observer, world.runners, world.trainer
        remembered = (observer.reports, observer.drops, runners.orders, trainer.trained, trainer.staleness)
        for each in (*remembered, world.engines.loaded):
            each.clear()
        if report.step in (200, 700):
            gc.collect()
            sizes[report.step] = tracemalloc.get_traced_memory()[0]

    world.observer.on_step = forget
    tracemalloc.start()
    try:
        run_virtually(world.driver.run())
    finally:
        tracemalloc.stop()
    print(f"traced bytes after 200 and 700 steps: {sizes}")
    assert sizes[700] - sizes[200] < 25_000
    assert world.ledger.num_trained == 2100


def test_training_goes_on_while_the_engines_load(tmp_path: Path) -> None:
    def seconds(max_versions: int, load_s: float) -> float:
        world = make_world(tmp_path / f"{max_versions} {load_s}", steps=30, max_versions=max_versions, num_tasks=200)
        world.engines.load_s = load_s
        world.runners.duration_s = lambda rng: 0.5
        run_virtually(world.driver.run())
        assert world.engines.loaded == list(range(31))
        assert all(0 <= lag <= max_versions for lag in world.trainer.staleness)
        return world.observer.ended_s

    assert seconds(0, 1.0) == pytest.approx(30 * (1.0 + 0.5 + 3 * 0.2) + 1.0, rel=0.05)
    assert seconds(4, 1.0) < 0.65 * seconds(0, 1.0)


def test_a_run_says_why_no_group_can_be_trained(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=1)
    world.runners.duration_s = lambda rng: 150.0
    run_virtually(world.driver.run())
    where = "3 running; the oldest under way is group 1"
    why = "the engines have version 0, step 1 is not done and staleness.max_versions is 0"
    assert world.observer.waits == [f"{where}; no group starts, because {why}"] * 2


def test_a_stalled_run_names_the_stage_and_the_state_of_every_engine(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=1)
    world.engines.load_s = 1e9
    world.driver._workers.open_calls = lambda: ["rollout engine 0, load weights: 1 calls open, the oldest for 600 s"]
    with pytest.raises(DeadlineError, match="loading the weights into the engines did not finish.* 600 s") as raised:
        run_virtually(world.driver.run())
    assert raised.value.__notes__[0].splitlines() == [
        "step 1 of 1, version 0; no group is live; more may start",
        "engine 0: version -1",
        "rollout engine 0, load weights: 1 calls open, the oldest for 600 s",
    ]


def test_slow_groups_are_waited_for_by_default_and_requeued_when_the_first_goes_first(tmp_path: Path) -> None:
    def run(order: Order) -> World:
        config = Config()
        config.staleness.order = order
        world = make_world(tmp_path / order, steps=12, max_versions=1, num_tasks=60, config=config)
        world.runners.duration_s = lambda rng: 30.0 if len(world.runners.orders) % 5 == 0 else 0.5
        run_virtually(world.driver.run())
        assert all(0 <= lag <= 1 for lag in world.trainer.staleness)
        assert Counter(world.trainer.trained).most_common(1)[0][1] == 1
        return world

    assert run(Order.oldest_first).ledger.counts()["dropped_stale"] == 0
    assert run(Order.ready_first).ledger.counts()["dropped_stale"] > 0


def test_evaluation_is_of_one_version_while_training_goes_on(tmp_path: Path) -> None:
    config = Config()
    config.eval.every, config.eval.episodes = 2, 3
    world = make_world(tmp_path, steps=6, max_versions=1, config=config)
    run_virtually(world.driver.run())
    found = [(each.step, each.version, each.num_episodes, each.num_failed) for each in world.observer.evaluations]
    assert found == [(0, 0, 6, 0), (2, 2, 6, 0), (4, 4, 6, 0), (6, 6, 6, 0)]
    assert world.observer.evaluations[0].reward == pytest.approx(1 / 3)
    assert world.ledger.counts()["admitted_total"] == 18


def evaluated_world(folder: Path, held_out: dict[int, float], *, steps: int, every: int, **settings: object) -> World:
    """A run whose evaluations find these rewards, by version."""
    config = Config()
    config.eval.every, config.run.keep_checkpoints = every, 2
    for name, value in settings.items():
        setattr(config.run, name, value)
    world = make_world(folder, steps=steps, config=config)

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        reward = float(index % 2) if order.engine is None else held_out[world.engines.version]
        return reward, EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    return world


def test_the_last_step_is_evaluated_and_the_best_checkpoint_outlives_the_others(tmp_path: Path) -> None:
    world = evaluated_world(tmp_path, {0: 0.9, 2: 0.5, 4: 0.4, 6: 0.3, 7: 0.2}, steps=7, every=2)
    run_virtually(world.driver.run())
    assert [(each.step, each.reward) for each in world.observer.evaluations] == [
        (0, 0.9), (2, 0.5), (4, 0.4), (6, 0.3), (7, 0.2)
    ]  # fmt: skip
    assert world.checkpoints.steps() == [2, 6, 7]
    best = tmp_path / "checkpoints" / "best"
    assert (os.readlink(best), world.checkpoints.best()) == ("step_2", 2)
    assert read_state(best).version == 2


def test_a_better_checkpoint_takes_the_name_of_the_best(tmp_path: Path) -> None:
    world = evaluated_world(tmp_path, {0: 0.0, 1: 0.5, 2: 0.7, 3: 0.1, 4: 0.1, 5: 0.8}, steps=5, every=1)
    run_virtually(world.driver.run())
    assert (world.checkpoints.best(), world.checkpoints.steps()) == (5, [4, 5])


def test_a_resumed_run_evaluates_only_what_has_no_record_and_knows_the_best(tmp_path: Path) -> None:
    rewards = {0: 0.0, 2: 0.5, 3: 0.1, 4: 0.2}
    first = evaluated_world(tmp_path, rewards, steps=4, every=2)
    first.observer.on_step = lambda report: first.driver.request_stop() if report.step == 3 else None
    run_virtually(first.driver.run())
    assert [each.step for each in first.observer.evaluations] == [0, 2]
    (tmp_path / "checkpoints" / "best").unlink()  # as after a kill before it was written
    again = evaluated_world(tmp_path, rewards, steps=4, every=2)
    again.driver._held_out = HeldOut({0: 0.0, 2: 0.5})

    async def go() -> None:
        found = again.checkpoints.newest_whole()
        assert found is not None
        await again.driver.restore(found.folder, found.state)
        await again.driver.run()

    run_virtually(go())
    assert [each.step for each in again.observer.evaluations] == [3, 4]
    assert again.checkpoints.best() == 2


def test_a_run_ends_early_when_a_metric_meets_its_bound_and_is_evaluated_and_saved(tmp_path: Path) -> None:
    world = evaluated_world(
        tmp_path, {0: 0.0, 2: 0.5, 4: 0.95, 5: 0.9, 6: 0.9}, steps=20, every=2, stop_when="eval/reward>=0.95"
    )
    run_virtually(world.driver.run())
    assert world.driver.ended_early == "eval/reward>=0.95 since step 4"
    last = world.driver.step
    assert last in (4, 5, 6)
    assert world.observer.evaluations[-1].step == last
    assert (world.checkpoints.steps()[-1], world.checkpoints.best()) == (last, 4)


def test_an_evaluation_that_is_lost_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    config = Config()
    config.eval.every = 1
    world = make_world(tmp_path, steps=2, config=config)

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if order.engine is not None:
            raise WorkerError("the engine died")
        return float(index % 2), EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    assert [(each.reward, each.num_failed, each.detail) for each in world.observer.evaluations] == [
        (None, 2, "the engine died")
    ] * 3
    assert not world.engines.pinned


def test_colocated_engines_sleep_while_the_trainer_works(tmp_path: Path) -> None:
    config = Config()
    config.cluster.placement = Placement.colocated
    world = make_world(tmp_path, steps=4, max_versions=1, config=config)
    accumulate, awake = world.trainer.accumulate, []

    async def watched(groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        awake.append(world.engines.awake.is_set())
        return await accumulate(groups, oldest_version)

    world.trainer.accumulate = watched  # type: ignore[method-assign]
    world.trainer.not_finite = {1}
    world.config.run.checkpoint_every = 3
    run_virtually(world.driver.run())
    assert awake == [False] * 4
    assert world.engines.loaded == [0, 1, 1, 2, 3]  # they wake by loading, also after an update that was skipped
    work, give_back = ["sleep", "reload", "prepare", "accumulate", "step", "stage"], ["offload", "load"]
    third = [*work, "snapshot", *give_back, "write"]
    last_save = ["sleep", "reload", "snapshot", "write"]
    step = [*work, *give_back]
    assert world.trainer.log == ["stage", *give_back, *step, *step, *third, *step, *last_save]


class FakeProbe:
    """Engines and a trainer that are `difference` nats apart."""

    def __init__(self, difference: float, log: list[str]) -> None:
        self._difference = difference
        self.log = log

    async def replies(self) -> list[Sample]:
        self.log.append("ask")
        return []

    async def difference(self, replies: Sequence[Sample]) -> float:
        self.log.append("compare")
        return self._difference


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_engines_that_compute_another_model_end_the_run_before_an_episode(difference: float, tmp_path: Path) -> None:
    world = make_world(tmp_path, probe=FakeProbe(difference, []))
    with pytest.raises(RunError, match=f"differ by {difference:g} nats on average, and may by 0.001 with model.dtype"):
        run_virtually(world.driver.run())
    assert world.runners.orders == []


def test_colocated_engines_sleep_while_the_trainer_compares(tmp_path: Path) -> None:
    config = Config()
    config.cluster.placement = Placement.colocated
    probe = FakeProbe(1e-5, [])
    world = make_world(tmp_path, steps=1, config=config, probe=probe)
    probe.log = world.trainer.log
    run_virtually(world.driver.run())
    awake = ["stage", "offload", "load"]
    assert probe.log[:10] == [*awake, "ask", "sleep", "reload", "compare", *awake]
    assert world.engines.loaded == [0, 0, 1]


def test_a_colocated_trainer_that_is_awake_is_saved_after_a_failure(tmp_path: Path) -> None:
    config = Config()
    config.cluster.placement = Placement.colocated
    world = make_world(tmp_path, config=config)
    world.trainer.dies_at = 2
    with pytest.raises(RunError, match="the trainer died"):
        run_virtually(world.driver.run())
    assert world.trainer.log[-7:] == ["reload", "prepare", "accumulate", "sleep", "reload", "snapshot", "write"]
    assert world.checkpoints.steps() == [1]


def test_old_tokens_are_masked_when_the_late_policy_says_so(tmp_path: Path) -> None:
    config = Config()
    config.staleness.order, config.staleness.late = Order.ready_first, Late.mask
    world = make_world(tmp_path, steps=10, max_versions=1, config=config)
    world.runners.duration_s = lambda rng: 3.0 if rng.random() < 0.3 else 0.5
    run_virtually(world.driver.run())
    oldest = [group.oldest_version for report in world.observer.reports for group in report.groups]
    trained_at = [report.trained_version for report in world.observer.reports for _ in report.groups]
    assert max(at - first for at, first in zip(trained_at, oldest, strict=True)) > 1
    assert max(world.trainer.staleness) <= 1


def saved_state(world: World, step: int) -> tuple[dict[str, object], RunState, dict[str, int]]:
    """What the checkpoint of a step holds: the trainer's content, the driver's state, the ledger's counts."""
    folder = world.checkpoints.path(step)
    trainer = json.loads((folder / "trainer" / "trainer.json").read_text())
    return trainer, read_state(folder), counts_by_state(folder / "ledger.db")


def test_a_save_that_takes_long_holds_up_no_step_and_is_of_one_moment(tmp_path: Path) -> None:
    """Several steps are trained, and groups trained that were ready, before the first write ends."""

    def run(write_s: float) -> World:
        config = Config()
        config.staleness.order = Order.ready_first
        world = make_world(tmp_path / str(write_s), steps=7, max_versions=3, num_tasks=60, config=config)
        world.config.run.checkpoint_every = 4
        world.trainer.write_s = write_s
        world.runners.duration_s = lambda rng: 0.2
        run_virtually(world.driver.run())
        assert world.observer.saves == ["step_4", "step_7"]
        assert_conserved(world)
        return world

    at_once, slow = run(0.0), run(2.2)
    assert slow.observer.ended_s == at_once.observer.ended_s
    between = slow.trainer.log[slow.trainer.log.index("write") :]
    assert between.count("step") == 3
    trainer, state, counts = saved_state(slow, 4)
    assert trainer == {"version": 4, "trained": slow.trainer.trained[:12]}
    assert (state.step, state.version, counts["trained"]) == (4, 4, 12)
    # Groups that waited then and have been trained since.
    assert len(state.ready) == counts["ready"] > 0
    assert {group.task_id for group in state.ready} & set(slow.trainer.trained[12:])
    assert all(group.advantages and group.episodes for group in state.ready)
    payloads = json.loads((slow.checkpoints.path(4) / "ready").read_text())
    assert payloads == [
        stored
        for group in state.ready
        for stored in (
            *(f"{group.task_id}/{group.group_id}/{i}" for i in range(4)),
            f"images of group {group.group_id}",
        )
    ]
    assert (state, counts) == saved_state(at_once, 4)[1:]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=3)
    world.config.run.checkpoint_every = 1
    world.trainer.write_s = 10.0
    run_virtually(world.driver.run())
    saving = [call for call in world.trainer.log if call in ("step", "snapshot", "write")]
    assert saving == ["step", "snapshot", "write"] * 3
    assert world.observer.saves == ["step_1", "step_2", "step_3"]
    spans = [[span for span in report.spans if span.actor == "checkpoint"] for report in world.observer.reports]
    assert [[span.name for span in each] for each in spans] == [["checkpoint"], *[["write", "checkpoint"]] * 2]
    outcomes = [span.facts["outcome"] for each in spans for span in each]
    assert outcomes == [
        "copied after step 1",
        *("step 1 saved", "copied after step 2"),
        *("step 2 saved", "copied after step 3"),
    ]
    assert world.observer.ended_s > 20.0


def test_a_save_that_fails_ends_the_run_while_it_trains(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=50)
    world.config.run.checkpoint_every = 2
    world.trainer.write_s, world.trainer.full_at = 1.5, 1
    world.runners.duration_s = lambda rng: 0.2
    with pytest.raises(RunError, match="no disk space left for a checkpoint in .*run the same command again"):
        run_virtually(world.driver.run())
    last = world.trainer.version
    assert 4 < last < 50
    # The second save failed; what came after it is tried once more, and kept.
    assert world.observer.saves == ["step_2", f"step_{last}"]
    assert saved_state(world, last)[0]["version"] == last
    assert not list(world.checkpoints.folder.glob("*.partial"))


def test_a_disk_that_stays_full_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=3)
    world.config.run.checkpoint_every = 2
    write = world.trainer.write_snapshot

    async def full(folder: Path) -> dict[str, str]:
        world.trainer.full_at = world.trainer.writes or None
        return await write(folder)

    world.trainer.write_snapshot = full  # type: ignore[method-assign]
    with pytest.raises(RunError, match="no disk space left") as raised:
        run_virtually(world.driver.run())
    assert raised.value.__notes__[0] == "the steps since the last checkpoint could not be saved, for the same reason"
    assert world.checkpoints.steps() == [2]


def test_an_update_that_was_not_finished_is_not_saved(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=5)
    world.config.run.checkpoint_every = 1
    step = world.trainer.step

    async def breaks(*, is_last: bool) -> StepOutcome:
        outcome = await step(is_last=is_last)
        if world.trainer.steps == 3:
            raise WorkerError("one rank of several failed")
        return outcome

    world.trainer.step = breaks  # type: ignore[method-assign]
    with pytest.raises(RunError, match="one rank of several failed") as raised:
        run_virtually(world.driver.run())
    assert "the update may have been done in part" in raised.value.__notes__[0]
    assert world.checkpoints.steps() == [1, 2]


def test_a_run_that_stops_waits_for_the_write(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=50, max_versions=1)
    world.config.run.checkpoint_every = 2
    world.trainer.write_s = 60.0
    world.observer.on_step = lambda report: world.driver.request_stop() if report.step == 3 else None
    run_virtually(world.driver.run())
    assert world.observer.saves == ["step_2", "step_3"]
    assert world.checkpoints.steps() == [2, 3]
    assert saved_state(world, 2)[0]["version"] == 2


def test_a_failed_run_waits_for_the_write(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=50)
    world.config.run.checkpoint_every = 1
    world.trainer.write_s = 60.0
    world.observer.on_step = lambda report: world.driver.fail(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run_virtually(world.driver.run())
    assert world.observer.saves == ["step_1"]


def test_a_write_that_never_ends_is_named(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=2000)
    world.config.run.checkpoint_every = 1
    world.trainer.write_s = 1e9
    with pytest.raises(DeadlineError, match="saving the trainer did not finish within its deadline of 1800 s"):
        run_virtually(world.driver.run())


def test_a_run_killed_in_a_write_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    folder, ledger = tmp_path / "run", tmp_path / "ledger.db"
    world = make_world(folder, steps=9, max_versions=1, ledger=ledger)
    world.config.run.checkpoint_every = 2
    world.trainer.write_s = 0.1

    async def until_killed() -> None:
        running = asyncio.ensure_future(world.driver.run())
        while world.trainer.writes < 2:
            await asyncio.sleep(0.05)
        # What is on the disk now is all that a killed process leaves.
        shutil.copytree(tmp_path, tmp_path.with_name("killed"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtually(until_killed())
    world.ledger.close()
    left = tmp_path.with_name("killed")
    assert sorted(entry.name for entry in (left / "run" / "checkpoints").iterdir()) == ["step_2", "step_4.partial"]
    shutil.copy(left / "run" / "checkpoints" / "step_2" / "ledger.db", left / "resumed.db")
    again = make_world(left / "run", steps=9, max_versions=1, ledger=left / "resumed.db")

    async def resume() -> None:
        found = again.checkpoints.newest_whole()
        assert found is not None
        await again.driver.restore(found.folder, found.state)
        await again.driver.run()

    run_virtually(resume())
    assert again.trainer.version == 9
    assert again.checkpoints.steps() == [2, 9]
    assert max(Counter(again.trainer.trained).values()) == 1
    assert again.ledger.num_trained == len(again.trainer.trained) == 27
    assert not list(again.checkpoints.folder.glob("*.partial"))


def test_a_users_function_that_fails_ends_the_run_and_the_steps_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\n"
        "def advantage(groups):\n"
        "    calls.append(groups)\n"
        "    return [[[0.5 if len(calls) < 9 else float('nan')] for one in group] for group in groups]\n"
    )
    config = Config()
    config.algorithm.advantage = f"{file}:advantage"
    world = make_world(tmp_path, steps=9, config=config)
    with pytest.raises(ConfigError, match=r"advantage returned \[nan\] for an episode; it must return a list"):
        run_virtually(world.driver.run())
    assert world.observer.saves == ["step_2"]
    assert saved_state(world, 2)[2]["trained"] == 6


def test_a_clock_that_is_set_changes_no_duration(tmp_path: Path) -> None:
    """Another reading of the machine's clock each time: an hour back, a day forward."""
    jumps = itertools.cycle([0.0, -3600.0, 86400.0])

    def wall() -> float:
        return 1.7e9 + asyncio.get_running_loop().time() + next(jumps)

    world = make_world(tmp_path, steps=6, max_versions=1, now=wall)
    world.config.run.checkpoint_every = 2
    run_virtually(world.driver.run())
    since_s = world.observer.reports[0].start_s
    for report in world.observer.reports:
        record = step_record(report, since_s=since_s, num_tokens_before=0)
        assert 0 < (record["step_time"] or 0) <= world.observer.ended_s
        for name in ("time/weights", "time/checkpoint"):
            assert 0 <= (record[name] or 0) <= (record["step_time"] or 0)
        assert all(0 <= span.end_s - span.start_s <= world.observer.ended_s for span in report.spans)
        since_s = report.end_s
    assert {span.name for report in world.observer.reports for span in report.spans} == {
        "weights",
        "checkpoint",
        "write",
        "train",
    }


def test_a_ledger_that_cannot_be_written_ends_the_run_with_everything_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process keeps it locked from the third step on."""
    monkeypatch.setattr("rlflow.groups.ledger.LOCK_S", 0.0)
    path = tmp_path / "ledger.db"
    world = make_world(tmp_path, steps=10, max_versions=1, ledger=path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def lock(report: StepReport) -> None:
            if report.step == 3:
                other.execute("BEGIN IMMEDIATE")

        world.observer.on_step = lock
        with pytest.raises(RunError, match=r"the ledger cannot be written in .*ledger\.db: database is locked"):
            run_virtually(world.driver.run())
        world.ledger.close()
    (saved,) = world.observer.saves
    assert counts_by_state(world.checkpoints.folder / saved / "ledger.db") == world.ledger.counts()
    assert_conserved(world)
    resumed = make_world(tmp_path, steps=10, max_versions=1, ledger=world.checkpoints.folder / saved / "ledger.db")

    async def resume() -> None:
        folder = world.checkpoints.folder / saved
        await resumed.driver.restore(folder, read_state(folder))
        await resumed.driver.run()

    run_virtually(resume())
    assert len(resumed.trainer.trained) == len(set(resumed.trainer.trained)) == 30


def test_a_ledger_that_fails_after_the_last_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.groups.ledger.LOCK_S", 0.0)
    path = tmp_path / "ledger.db"
    world = make_world(tmp_path, steps=2, ledger=path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def lock(report: StepReport) -> None:
            if report.step == 2:
                world.ledger.advance(world.ledger.admit("one more", version=2), GroupState.RUNNING)
                other.execute("BEGIN IMMEDIATE")

        world.observer.on_step = lock
        with pytest.raises(RunError, match="the ledger cannot be written"):
            run_virtually(world.driver.run())
        world.ledger.close()
    assert world.observer.saves == ["step_2"]
    assert counts_by_state(world.checkpoints.folder / "step_2" / "ledger.db")["dropped_cancelled"] == 1
