"""The ledger: every admitted group ends exactly once, on disk as in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlflow.groups.ledger import DropReason, GroupState, Ledger, counts_by_state

LIFE = [GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING, GroupState.TRAINED]


def test_a_group_lives_from_admission_to_training(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    group_id = ledger.admit("task", task_pass=2, version=7)
    for state in LIFE:
        assert ledger.num_live == 1
        ledger.advance(group_id, state)
    assert (ledger.num_live, ledger.num_trained, ledger.counts()["admitted_total"]) == (0, 1, 1)
    assert ledger.task_of(group_id) == ("task", 2)


def test_a_state_cannot_be_skipped_nor_an_ended_group_moved() -> None:
    ledger = Ledger()
    group_id = ledger.admit("task", task_pass=0, version=0)
    with pytest.raises(AssertionError, match="cannot go from admitted to ready"):
        ledger.advance(group_id, GroupState.READY)
    ledger.drop(group_id, DropReason.STALE)
    with pytest.raises(KeyError):
        ledger.drop(group_id, DropReason.STALE)


def test_a_reopened_ledger_counts_the_same(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    first, second = (ledger.admit(name, task_pass=0, version=0) for name in ("a", "b"))
    ledger.advance(first, GroupState.RUNNING)
    ledger.drop(second, DropReason.FAILED, "the runner died")
    counts = ledger.counts()
    (tmp_path / "copy.db").write_bytes(ledger.copy())
    ledger.close()
    for path in (tmp_path / "ledger.db", tmp_path / "copy.db"):
        assert counts_by_state(path) == counts
        reopened = Ledger(path)
        assert reopened.counts() == counts
        assert reopened.live() == [first]
        assert reopened.admit("c", task_pass=0, version=0) == 3
        assert reopened.num_drops_of("b", 0, DropReason.FAILED) == 1
        assert reopened.num_drops_of("b", 1, DropReason.FAILED) == 0
        reopened.close()


def test_counting_a_run_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no ledger at"):
        counts_by_state(tmp_path / "ledger.db")


class AnyLife(RuleBasedStateMachine):
    """Whatever happens to groups, in whatever order: admitted = live + trained + dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.admitted = 0

    @rule()
    def admit(self) -> None:
        self.ledger.admit(f"t{self.admitted}", task_pass=0, version=0)
        self.admitted += 1

    @precondition(lambda self: self.ledger.num_live)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.ledger.live()))
        position = next(
            i for i, state in enumerate([GroupState.ADMITTED, *LIFE]) if group_id in self.ledger.live(state)
        )
        self.ledger.advance(group_id, LIFE[position])

    @precondition(lambda self: self.ledger.num_live)
    @rule(data=st.data(), reason=st.sampled_from(DropReason))
    def drop(self, data: st.DataObject, reason: DropReason) -> None:
        self.ledger.drop(data.draw(st.sampled_from(self.ledger.live())), reason)

    @invariant()
    def conserved(self) -> None:
        counts = self.ledger.counts()
        total = counts.pop("admitted_total")
        ended = counts["trained"] + sum(counts[f"dropped_{reason}"] for reason in DropReason)
        assert total == self.admitted == sum(counts.values()) == ended + self.ledger.num_live


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
