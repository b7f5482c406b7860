"""The ledger: every admitted group ends exactly once, on disk as in memory."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from disks import on_small_disk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledgers import copied

from rlflow.errors import RunError
from rlflow.groups.ledger import ROWS_AT_ONCE, DropReason, GroupState, Ledger, counts_by_state

LIFE = [GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING, GroupState.TRAINED]


def test_a_group_lives_from_admission_to_training(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    group_id = ledger.admit("task", task_pass=2, version=7)
    for state in LIFE:
        assert ledger.num_live == 1
        ledger.advance(group_id, state)
    assert (ledger.num_live, ledger.num_trained, ledger.counts()["admitted_total"]) == (0, 1, 1)
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        assert database.execute("SELECT task, pass, state, admitted_version FROM groups").fetchall() == [
            ("task", 2, "trained", 7)
        ]


def test_a_state_cannot_be_skipped_nor_an_ended_group_moved() -> None:
    ledger = Ledger()
    group_id = ledger.admit("task", task_pass=0, version=0)
    with pytest.raises(AssertionError, match="cannot go from admitted to ready"):
        ledger.advance(group_id, GroupState.READY)
    ledger.drop(group_id, DropReason.STALE)
    with pytest.raises(KeyError):
        ledger.drop(group_id, DropReason.STALE)


def test_a_detail_with_half_a_character_is_written_as_an_escape(tmp_path: Path) -> None:
    """An error may repeat what a model has put into JSON."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.drop(ledger.admit("task", version=0), DropReason.FAILED, "no such key: \ud800")
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        assert database.execute("SELECT detail FROM groups").fetchall() == [("no such key: \\ud800",)]


def test_a_reopened_ledger_counts_the_same(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    first, second = (ledger.admit(name, task_pass=0, version=0) for name in ("a", "b"))
    ledger.advance(first, GroupState.RUNNING)
    ledger.drop(second, DropReason.FAILED, "the runner died")
    counts = ledger.counts()
    (tmp_path / "copy.db").write_bytes(asyncio.run(copied(ledger)))
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


# -- a disk that does not take it


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """What another process does that keeps a transaction open."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def states_on_disk(path: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT id, state FROM groups ORDER BY id").fetchall()


def test_the_event_loop_goes_on_while_another_process_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    async def run() -> None:
        ledger = Ledger(path)
        with locked(path):
            for number in range(3 * ROWS_AT_ONCE):
                ledger.admit(f"t{number}", task_pass=0, version=0)
            copy = ledger.copy()
            ledger.advance(1, GroupState.RUNNING)
            flushing = asyncio.create_task(ledger.flush())
            for _ in range(1000):
                await asyncio.sleep(0)
            assert states_on_disk(path) == [] and not flushing.done()
        await flushing
        (tmp_path / "copy.db").write_bytes(await copy)
        await ledger.flush()
        await ledger.flush()
        admitted = [(number + 1, "admitted") for number in range(3 * ROWS_AT_ONCE)]
        assert states_on_disk(path) == [(1, "running"), *admitted[1:]]
        assert states_on_disk(tmp_path / "copy.db") == admitted
        ledger.close()

    asyncio.run(run())


def test_a_copy_holds_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.groups.ledger.LOCK_S", 0.0)
    path = tmp_path / "ledger.db"

    async def run() -> None:
        ledger = Ledger(path)
        ledger.admit("a", version=0)
        await ledger.flush()
        await ledger.flush()
        with locked(path):
            ledger.advance(1, GroupState.RUNNING)
            ledger.admit("b", version=0)
            await ledger.flush()
            with pytest.raises(
                RunError, match=r"the ledger cannot be written in .*ledger\.db: database is locked; end the process"
            ):
                await ledger.flush()
            ledger.drop(2, DropReason.FAILED, "lost")
            (tmp_path / "copy.db").write_bytes(await ledger.copy())
            assert states_on_disk(path) == [(1, "admitted")]
            ledger.close()
        assert states_on_disk(tmp_path / "copy.db") == [(1, "running"), (2, "dropped")]
        reopened = Ledger(tmp_path / "copy.db")
        assert reopened.counts() == ledger.counts()
        reopened.close()

    asyncio.run(run())


FULL = """
import asyncio, sys
from pathlib import Path
from rlflow.errors import RunError
from rlflow.groups.ledger import Ledger, counts_by_state

async def run(folder, copy):
    ledger = Ledger(folder / "ledger.db")
    (folder / "large").write_bytes(bytes(700 * 1024))
    try:
        while True:
            ledger.admit("task" * 100, version=0)
            await ledger.flush()
    except RunError as error:
        print(error)
    copy.write_bytes(await ledger.copy())
    assert counts_by_state(copy) == ledger.counts() != counts_by_state(folder / "ledger.db")
    ledger.close()

asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_a_full_disk_under_the_ledger_says_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    done = on_small_disk(folder, "1m", [sys.executable, "-c", FULL, str(folder), str(tmp_path / "copy.db")])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"no disk space left for the ledger in {folder / 'ledger.db'} (0 MB free)")
    assert "run the same command again" in done.stdout


def test_a_pass_that_is_over_leaves_nothing_behind(tmp_path: Path) -> None:
    """Drops are counted while the pass of their task may go on, also by a ledger that is opened again."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    for task in ("a", "b"):
        ledger.drop(ledger.admit(task, version=0), DropReason.STALE)
    again = ledger.admit("a", task_pass=0, version=0)
    for state in LIFE:
        ledger.advance(again, state)
    ledger.close()
    ledger = Ledger(path)
    assert ledger.num_drops_of("b", 0, DropReason.STALE) == 1
    assert ledger.num_drops_of("a", 0, DropReason.STALE) == 0
    live = ledger.admit("b", task_pass=0, version=1)
    ledger.admit("b", version=1)
    assert ledger.num_drops_of("b", 0, DropReason.STALE) == 1  # that pass still goes on
    ledger.drop(live, DropReason.NO_VERDICT)
    ledger.admit("b", version=1)
    assert ledger.num_drops_of("b", 0, DropReason.STALE) == 0
    ledger.close()


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
