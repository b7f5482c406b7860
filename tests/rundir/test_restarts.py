"""How often a run goes on after a loss."""

import pytest

from rlflow.errors import WorkerLost
from rlflow.rundir.restarts import Restarts, Setback, larger_setback

LOST = WorkerLost("the trainer rank 0 died")


def test_three_restarts_without_a_newer_checkpoint_and_no_more() -> None:
    restarts = Restarts(saved_step=4)
    assert [restarts.count(LOST, 4) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(WorkerLost, match="^the trainer rank 0 died\nthe run was started again 3 times from step 4, "):
        restarts.count(LOST, 4)


def test_a_newer_checkpoint_begins_the_count_anew() -> None:
    restarts = Restarts(saved_step=0)
    assert [restarts.count(LOST, step) for step in (0, 0, 5, 5, 5, 10)] == [1, 2, 1, 2, 3, 1]


def test_a_loss_is_kept_until_it_is_made_up_for() -> None:
    before = Setback(step=7, at_s=1.0)
    assert larger_setback(before, 6) is before
    assert larger_setback(before, 7).at_s > 1.0
    assert (larger_setback(before, 8).step, larger_setback(None, 3).step) == (8, 3)
