"""How a run ends, or goes on, when something in it breaks or does not answer: the driver on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import World, make_world, run_virtually

from rlflow.config import Config, Placement
from rlflow.driver import StepReport
from rlflow.errors import DeadlineError, EngineLost, RunError, WorkerHung, WorkerLost
from rlflow.groups.ledger import DropReason, GroupState, Ledger
from rlflow.roles import REFERENCE
from rlflow.run import resume_command
from rlflow.rundir.store import read_state
from rlflow.types import EpisodeEnd, GroupOrder, PayloadRef

FOREVER_S = 1e9


async def hang(*_: object) -> None:
    await asyncio.sleep(FOREVER_S)


def end_after(world: World, step: int, error: Exception) -> None:
    def raise_it(report: StepReport) -> None:
        if report.step == step:
            raise error

    world.observer.on_step = raise_it


# -- any exception saves


@pytest.mark.parametrize("error", [AssertionError("a share above 1"), BrokenPipeError(32, "Broken pipe"), ValueError()])
def test_an_error_of_any_kind_saves_and_is_the_one_that_is_raised(error: Exception, tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9, max_versions=1)
    end_after(world, 3, error)
    with pytest.raises(type(error)) as caught:
        run_virtually(world.driver.run())
    assert caught.value is error
    assert error.__notes__ == ["the run is saved as it was after step 3"]
    assert world.observer.saves == ["step_3"]
    assert Ledger(world.checkpoints.path(3) / "ledger.db").num_trained == 9
    assert not world.runners.started, "groups are still being played"


def test_a_second_error_while_saving_is_a_note_of_the_first(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9)
    end_after(world, 2, AssertionError("the first"))

    async def broken() -> None:
        raise OSError("the second")

    world.trainer.snapshot = broken
    with pytest.raises(AssertionError, match="^the first\n") as caught:
        run_virtually(world.driver.run())
    assert caught.value.__notes__ == ["the steps since the last checkpoint could not be saved: the second"]


def fail_at(world: World, state: GroupState | DropReason) -> OSError:
    """Once, the ledger cannot write this state."""
    error, errors = OSError(5, "Input/output error"), [1]
    advance, drop = world.ledger.advance, world.ledger.drop

    def broken_advance(group_id: int, to: GroupState, *, version: int | None = None) -> None:
        if to is state and world.trainer.version == 2 and errors:
            errors.clear()
            raise error
        advance(group_id, to, version=version)

    def broken_drop(group_id: int, reason: DropReason, detail: str = "") -> None:
        if reason is state and world.trainer.version == 2 and errors:
            errors.clear()
            raise error
        drop(group_id, reason, detail)

    world.ledger.advance, world.ledger.drop = broken_advance, broken_drop  # type: ignore[method-assign]
    return error


@pytest.mark.parametrize("state", [GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING])
def test_a_ledger_that_cannot_write_ends_the_run_with_the_steps_saved(state: GroupState, tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9)
    error = fail_at(world, state)
    with pytest.raises(OSError) as caught:
        run_virtually(world.driver.run())
    assert caught.value is error
    assert world.observer.saves == ["step_2"]


def test_a_ledger_that_cannot_write_a_lost_group_ends_the_run(tmp_path: Path) -> None:
    """What is raised while another failure is handled is not swallowed with it."""
    world = make_world(tmp_path, steps=9)
    error = fail_at(world, DropReason.FAILED)

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if world.trainer.version == 2:
            raise EngineLost("the engine died")
        return float(index % 2), EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    with pytest.raises(OSError) as caught:
        run_virtually(world.driver.run())
    assert caught.value is error
    assert world.observer.saves == ["step_2"]


def test_a_ledger_that_cannot_admit_ends_the_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9, max_versions=1)
    admit, error = world.ledger.admit, OSError(5, "Input/output error")

    def broken(task_id: str, *, task_pass: int | None = None, version: int) -> int:
        if world.trainer.version == 2:
            raise error
        return admit(task_id, task_pass=task_pass, version=version)

    world.ledger.admit = broken  # type: ignore[method-assign]
    with pytest.raises(OSError) as caught:
        run_virtually(world.driver.run())
    assert caught.value is error
    assert len(world.observer.saves) == 1


def test_an_update_that_the_ledger_has_not_counted_is_not_saved(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9)
    world.config.run.checkpoint_every = 2
    error = fail_at(world, GroupState.TRAINED)  # in the step after the second update
    with pytest.raises(OSError) as caught:
        run_virtually(world.driver.run())
    assert caught.value is error
    (note,) = error.__notes__
    assert note == (
        "the steps since the last checkpoint could not be saved: the update may have been done in part, or not counted"
    )


# -- what does not answer and holds what only checkpoints hold


@pytest.mark.parametrize(
    ("call", "stage", "deadline_s"),
    [
        ("prepare", "preparing groups for training", 1800),
        ("accumulate", "accumulating gradients", 1800),
        ("step", "the optimiser step", 1800),
        ("stage", "staging the weights", 600),
        ("snapshot", "copying the trainer's state", 1700),
        ("write", "saving the trainer", 1700),
        ("offload", "taking the trainer off its devices", 600),
        ("reload", "bringing the trainer back to its devices", 600),
    ],
)
def test_a_trainer_that_hangs_is_lost_after_one_deadline(
    call: str, stage: str, deadline_s: int, tmp_path: Path
) -> None:
    config = Config()
    config.deadlines.checkpoint_s = 1700.0
    if call in ("offload", "reload"):
        config.cluster.placement = Placement.colocated
    world = make_world(tmp_path, steps=9, config=config)
    world.config.run.checkpoint_every = 2
    world.trainer.hangs_in, world.trainer.hangs_at = call, 2
    with pytest.raises(WorkerHung) as caught:
        run_virtually(world.driver.run())
    name = {1800: "train_s", 1700: "checkpoint_s", 600: "weights_s"}[deadline_s]
    assert str(caught.value) == (
        f"{stage} did not finish within its deadline of {deadline_s} s; raise deadlines.{name} if it takes this long"
    )
    assert isinstance(caught.value, WorkerLost), "so that the run goes on from its newest checkpoint"
    assert isinstance(caught.value, DeadlineError)
    assert world.trainer.ended.is_set(), "the processes are ended before anything waits for them again"
    assert world.trainer.unanswered == [call], "nothing asks it again"
    (state,) = caught.value.__notes__
    assert "of 9, version" in state.splitlines()[0]


def test_a_trainer_that_cannot_load_is_lost(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=2)
    run_virtually(world.driver.run())
    again = make_world(tmp_path, steps=4)
    again.trainer.hangs_in = "restore"
    with pytest.raises(WorkerHung, match=r"^loading the checkpoint did not finish .* of 1800 s; raise deadlines.check"):
        run_virtually(again.driver.restore(world.checkpoints.path(2), read_state(world.checkpoints.path(2))))


def test_a_write_ends_with_the_processes_when_another_call_hangs(tmp_path: Path) -> None:
    """The driver does not wait for the deadline of the write too."""
    world = make_world(tmp_path, steps=9)
    world.config.run.checkpoint_every = 2
    world.trainer.write_s = FOREVER_S
    world.trainer.hangs_in, world.trainer.hangs_at = "accumulate", 2

    async def run() -> float:
        with pytest.raises(WorkerHung, match="^accumulating gradients"):
            await world.driver.run()
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) < 1.2 * 1800


class HungReference:
    """Answers until so many updates are made."""

    def __init__(self, world: World, step: int) -> None:
        self._world, self._step = world, step

    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        if self._world.trainer.steps >= self._step:
            await hang()
        return list(payloads)


def test_a_reference_that_hangs_is_lost(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=9, max_versions=1)
    world.config.algorithm.kl_coefficient = 0.1
    world.driver._workers.frozen = {REFERENCE: HungReference(world, step=2)}
    with pytest.raises(WorkerHung, match="^the reference's log-probabilities .* 1800 s; raise deadlines.train_s if it"):
        run_virtually(world.driver.run())
    assert world.trainer.ended.is_set()
    assert not [drop for drop in world.observer.drops if drop[1] is DropReason.FAILED], "no group is at fault"
    assert world.observer.saves == []


# -- what does not answer and comes back


def test_a_rank_that_failed_is_asked_to_save_for_two_minutes_only(tmp_path: Path) -> None:
    """The others may wait for it in a collective."""
    world = make_world(tmp_path, steps=4)
    world.trainer.dies_at = 4
    world.trainer.snapshot = hang

    async def run() -> float:
        with pytest.raises(RunError, match="the trainer died") as caught:
            await world.driver.run()
        (note,) = caught.value.__notes__
        assert "copying the trainer's state did not finish within its deadline of 120 s" in note
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) < 300


def test_engines_may_take_longer_than_one_load_because_the_fleet_brings_back_what_hangs(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=2)
    world.engines.patience_s = 5000.0
    world.engines.load_s = 4000.0  # one that hung, was ended, started and loaded
    run_virtually(world.driver.run())
    assert world.trainer.version == 2


def test_a_checkpoint_is_given_up_when_a_runner_hangs_with_its_groups(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=6, max_versions=2)
    world.config.run.checkpoint_every = 2
    save, hung = world.runners.save_payloads, [1]

    async def stuck(payloads: Sequence[PayloadRef], path: Path) -> str:
        if hung and not hung.clear():
            await hang()
        return await save(payloads, path)

    world.runners.save_payloads = stuck
    run_virtually(world.driver.run())
    assert world.trainer.version == 6
    ((step, why),) = world.observer.given_ups
    assert (step, why) == (2, "saving the ready groups did not finish within its deadline of 1800 s")
    assert world.observer.saves[-1] == "step_6"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("python -m rlflow train recipe=smoke run.steps=9", "rlflow train recipe=smoke run.steps=9 run.dir=/runs/a"),
        ("python /bin/rlflow train recipe=x run.dir=a run.on_exists=fail", "rlflow train recipe=x run.dir=/runs/a"),
    ],
)
def test_a_run_that_was_stopped_says_what_goes_on_with_it(typed: str, told: str) -> None:
    assert resume_command(Path("/runs/a"), typed.split()) == told


def test_the_command_that_goes_on_can_be_pasted_into_a_shell() -> None:
    typed = ["python", "-m", "rlflow", "train", "reward.weights=[1, 2]"]
    assert resume_command(Path("/runs/a"), typed) == "rlflow train 'reward.weights=[1, 2]' run.dir=/runs/a"
