"""Several updates a step: who is in which, what the driver asks of the trainer, and what an end in between leaves."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import World, make_world, run_virtually

from rlflow.config import Config, Placement
from rlflow.errors import RunError, WorkerError
from rlflow.groups.ledger import DropReason, GroupState
from rlflow.groups.minibatches import minibatches
from rlflow.groups.updates import of_step
from rlflow.roles import PROXIMAL, Mean, StepOutcome, TrainWork
from rlflow.types import ReadyGroup, Span


def test_each_epoch_divides_all_groups_anew() -> None:
    """Whatever order they have come in, and in another way in each step of each run."""
    ids = [7, 3, 9, 4, 8, 5]
    places = [(1, 2, 0), (1, 2, 1), (1, 3, 0), (2, 2, 0)]
    found = [minibatches(ids, 3, seed=seed, step=step, epoch=epoch) for seed, step, epoch in places]
    for parts in found:
        assert [len(part) for part in parts] == [2, 2, 2]
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(ids)
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert [minibatches(sorted(ids), 3, seed=1, step=2, epoch=epoch) for epoch in range(2)] == found[:2]


def outcome(grad_norm: float, metrics: dict[str, Mean], tokens: int, peaks: list[int]) -> StepOutcome:
    work = TrainWork(tokens=tokens, flops=2.0 * tokens, padded_flops=3.0 * tokens, num_ranks=2, device="cpu")
    applied = math.isfinite(grad_norm)
    return StepOutcome(
        applied=applied,
        num_skipped=int(not applied),
        grad_norm=grad_norm,
        learning_rate=0.1,
        metrics=metrics,
        spans=[Span(actor="trainer 0", name="train", start_s=0.0, end_s=1.0)],
        work=work,
        memory_peaks=peaks,
    )


def test_figures_of_a_step_are_means_over_the_tokens_of_its_updates() -> None:
    """What compares engines and trainer is of the first update; what adapts comes with the last one."""
    clipped = [Mean(total=total, count=count) for total, count in ((0.0, 6.0), (1.0, 2.0), (3.0, 8.0))]
    gaps = [Mean(total=gap, count=1) for gap in (0.5, 7.0, 9.0)]
    first, skipped, last = (
        {"clip_fraction": clip, "sampling/logp_difference_max": gap} for clip, gap in zip(clipped, gaps, strict=True)
    )
    last["kl_coefficient"] = Mean(total=0.2, count=1)
    found = of_step(
        [outcome(2.0, first, 10, [3, 9]), outcome(math.nan, skipped, 4, [5, 1]), outcome(4.0, last, 6, [4, 4])]
    )
    assert (found.applied, found.num_skipped, found.grad_norm) == (True, 1, 3.0)
    assert {name: mean.value for name, mean in found.metrics.items()} == {
        "clip_fraction": 0.25, "sampling/logp_difference_max": 0.5, "kl_coefficient": 0.2,
    }  # fmt: skip
    assert found.work == TrainWork(tokens=20, flops=40.0, padded_flops=60.0, num_ranks=2, device="cpu")
    assert found.memory_peaks == [5, 9]
    assert len(found.spans) == 3


def test_a_step_without_an_update_has_no_norm() -> None:
    found = of_step([outcome(math.inf, {}, 1, []), outcome(math.nan, {}, 1, [])])
    assert not found.applied
    assert math.isnan(found.grad_norm)
    assert found.num_skipped == 2


def test_a_group_of_one_episode_has_equal_rewards(tmp_path: Path) -> None:
    config = Config()
    config.algorithm.advantage = "reinforce_pp"
    world = make_world(tmp_path, config=config)
    config.algorithm.group_size = 1
    run_virtually(world.driver.run())
    assert {report.num_zero_std for report in world.observer.reports} == {config.algorithm.groups_per_step}


def several(folder: Path, epochs: int = 2, minibatches: int = 3, **options: Any) -> World:
    """A world in which a step of three groups makes so many updates."""
    config = Config()
    config.algorithm.epochs, config.algorithm.minibatches = epochs, minibatches
    return make_world(folder, config=config, **options)


def parts_of(world: World) -> list[list[int]]:
    """The groups of each call of `accumulate`, as they come."""
    accumulate, parts = world.trainer.accumulate, list[list[int]]()

    async def recorded(groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        parts.append([group.group_id for group in groups])
        return await accumulate(groups, oldest_version)

    world.trainer.accumulate = recorded  # type: ignore[method-assign]
    return parts


def test_all_updates_of_a_step_lie_between_two_versions(tmp_path: Path) -> None:
    world = several(tmp_path, steps=2, seed=5)
    parts = parts_of(world)
    run_virtually(world.driver.run())
    step = ["prepare", *["accumulate", "step"] * 6, "stage"]
    assert [call for call in world.trainer.log if call not in ("load", "snapshot", "write")] == ["stage", *step, *step]
    expected = [
        part
        for number, ids in enumerate([[1, 2, 3], [4, 5, 6]])
        for epoch in range(2)
        for part in minibatches(ids, 3, seed=5, step=number, epoch=epoch)
    ]
    assert parts == expected
    assert world.engines.loaded == [0, 1, 2]
    assert [(report.version, report.trained_version) for report in world.observer.reports] == [(1, 0), (2, 1)]
    assert world.ledger.counts()["trained"] == 6
    assert world.ledger.counts()["admitted_total"] == 6
    kept = [group for report in world.observer.reports for group in report.groups]
    assert all(group.values is None and PROXIMAL not in group.frozen for group in kept)


def test_staleness_counts_versions_and_not_updates(tmp_path: Path) -> None:
    world = several(tmp_path, steps=6, max_versions=1)
    run_virtually(world.driver.run())
    assert world.trainer.version == 6
    assert set(world.trainer.staleness) <= {0, 1}
    assert Counter(world.trainer.trained).most_common(1)[0][1] == 1


def test_colocated_engines_sleep_through_all_updates_of_a_step(tmp_path: Path) -> None:
    config = Config()
    config.cluster.placement, config.algorithm.epochs = Placement.colocated, 2
    world = make_world(tmp_path, steps=1, config=config)
    run_virtually(world.driver.run())
    step = ["sleep", "reload", "prepare", "accumulate", "step", "accumulate", "step", "stage", "offload", "load"]
    assert world.trainer.log[3 : 3 + len(step)] == step


def test_a_gradient_that_is_not_finite_skips_one_update_of_several(tmp_path: Path) -> None:
    world = several(tmp_path, steps=3)
    # One update of the first step, none of the second, the last of the third.
    world.trainer.not_finite = {1, 17}
    run_virtually(world.driver.run())
    assert world.trainer.version == 3
    assert world.engines.loaded == [0, 1, 2, 3]
    reports = world.observer.reports
    assert [(each.outcome.applied, each.outcome.num_skipped) for each in reports] == [(True, 1), (True, 0), (True, 1)]
    assert [each.outcome.grad_norm for each in reports] == [1.0, 1.0, 1.0]
    assert world.ledger.counts()["trained"] == 9


def test_a_step_without_any_update_raises_no_version(tmp_path: Path) -> None:
    world = several(tmp_path, steps=2, epochs=2, minibatches=1)
    world.trainer.not_finite = {0, 1}
    run_virtually(world.driver.run())
    assert world.trainer.version == 1
    assert world.engines.loaded == [0, 1]
    assert [report.version for report in world.observer.reports] == [0, 1]


@pytest.mark.parametrize(
    ("not_finite", "saved", "note"),
    [
        ({4, 5, 6}, [1], "the run is saved as it was after step 1"),  # the second step has none that was applied
        ({2, 3, 4}, [], "the update may have been done in part"),
        ({0, 1, 2}, [0], "the run is saved as it was after step 0"),
    ],
)
def test_three_skipped_updates_in_a_row_stop_the_run(
    not_finite: set[int], saved: list[int], note: str, tmp_path: Path
) -> None:
    """Saved is only what is whole: nothing of a step of which some updates were applied."""
    world = several(tmp_path, steps=3)
    world.trainer.not_finite = not_finite
    with pytest.raises(RunError, match="not finite 3 times in a row") as caught:
        run_virtually(world.driver.run())
    assert note in caught.value.__notes__[0]
    assert world.checkpoints.steps() == saved


@pytest.mark.parametrize(("call", "saved"), [(7, [1]), (9, [])])
def test_an_error_between_two_updates_of_a_step_is_not_saved(call: int, saved: list[int], tmp_path: Path) -> None:
    """Before the first one nothing has changed, so that the steps before are saved."""
    world = several(tmp_path, steps=3)
    world.trainer.dies_at = call
    with pytest.raises(WorkerError, match="the trainer died") as caught:
        run_virtually(world.driver.run())
    assert world.checkpoints.steps() == saved
    assert ("the update may have been done in part" in caught.value.__notes__[0]) == (not saved)
    dropped = {drop[1] for drop in world.observer.drops}
    assert dropped == {DropReason.CANCELLED}


def test_a_stop_request_finishes_all_updates_of_the_step(tmp_path: Path) -> None:
    world = several(tmp_path, steps=50)
    accumulate = world.trainer.accumulate

    async def stopping(groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        if world.trainer.steps == 8:
            world.driver.request_stop()
        return await accumulate(groups, oldest_version)

    world.trainer.accumulate = stopping  # type: ignore[method-assign]
    run_virtually(world.driver.run())
    assert (world.trainer.steps, world.trainer.version) == (12, 2)
    assert world.observer.saves == ["step_2"]


def test_a_run_that_is_killed_between_two_updates_trains_every_task_once(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    ledger = tmp_path / "ledger.db"
    world = several(tmp_path, steps=4, num_tasks=12, ledger=ledger)
    world.config.run.checkpoint_every = 1
    step = world.trainer.step

    async def killed(*, is_last: bool) -> StepOutcome:
        if world.trainer.steps == 15:
            raise Killed
        return await step(is_last=is_last)

    world.trainer.step = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run_virtually(world.driver.run())
    assert world.ledger.counts()[GroupState.TRAINING] == 3
    world.ledger.close()
    found = world.checkpoints.newest_whole()
    assert found is not None and found.state.step == 2
    for left_over in tmp_path.glob("ledger.db*"):
        left_over.unlink()
    shutil.copy(found.folder / "ledger.db", ledger)
    again = several(tmp_path, steps=4, num_tasks=12, ledger=ledger)

    async def go_on() -> None:
        await again.driver.restore(found.folder, found.state)
        await again.driver.run()

    run_virtually(go_on())
    assert sorted(again.trainer.trained) == sorted(f"t{index}" for index in range(12))
    assert again.ledger.counts()["trained"] == 12
