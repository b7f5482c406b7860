"""The life of every group; the only place that changes a group's state.

    admitted -> running -> scored -> ready -> training -> trained
        |          |          |        |         |
        +----------+----------+--------+---------+--> dropped(reason)

Rules: every admitted group ends exactly once, and takes no other transition than these. What the run needs is in
memory, and does not grow with the run: the live groups, one count for each state, and of each task its last pass.
Everything is also in SQLite, so that a person can ask what became of a task during the run and after it.

    a change -> the row as it is now, in memory -> (one thread) -> SQLite

The event loop never waits for the disk or for another process's lock. What could not be written stays in memory, and a
copy holds it.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlflow.errors import RunError
from rlflow.runtime.disk import disk_errors


class GroupState(StrEnum):
    ADMITTED = "admitted"
    RUNNING = "running"
    SCORED = "scored"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    STALE = "stale"
    FILTERED = "filtered"
    NO_VERDICT = "no_verdict"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SLOW = "slow"
    """Its step was full before (rollout.oversample)."""

    @property
    def puts_task_back(self) -> bool:
        """Whether the task is tried again; the other reasons are final."""
        return self not in (DropReason.FILTERED, DropReason.NO_VERDICT)


ROWS_AT_ONCE = 64
"""Changed groups that are written without being asked. A killed process may lose the last ones. That does no harm: a
resume begins with a checkpoint's copy."""
LOCK_S = 60.0
"""Seconds that another process may keep the ledger locked before the run gives up."""

_NEXT = {
    GroupState.ADMITTED: GroupState.RUNNING,
    GroupState.RUNNING: GroupState.SCORED,
    GroupState.SCORED: GroupState.READY,
    GroupState.READY: GroupState.TRAINING,
    GroupState.TRAINING: GroupState.TRAINED,
}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    pass INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    detail TEXT,
    admitted_version INTEGER NOT NULL,
    trained_version INTEGER
);
CREATE INDEX IF NOT EXISTS groups_by_task ON groups (task, pass);
"""
_ENDS = (GroupState.TRAINED, GroupState.DROPPED)
_PUT = "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_LIVE = "SELECT * FROM groups WHERE state NOT IN ('trained', 'dropped') ORDER BY id"
_DROPS_OF_OPEN_PASSES = """
SELECT task, pass, reason, COUNT(*) FROM groups WHERE reason NOT IN ('filtered', 'no_verdict') AND NOT EXISTS (
    SELECT 1 FROM groups AS ended WHERE ended.task = groups.task AND ended.pass = groups.pass
    AND (ended.state = 'trained' OR ended.reason IN ('filtered', 'no_verdict'))
) GROUP BY task, pass, reason
"""


class _Row(NamedTuple):
    """A group as it is in the table."""

    id: int
    task: str
    task_pass: int
    state: GroupState
    reason: DropReason | None
    detail: str | None
    admitted_version: int
    trained_version: int | None


class Ledger:
    """Groups by id. Methods raise AssertionError for a transition that is not drawn above.

    It is used in an event loop, by one task at a time; `close` may be called outside.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open or create the ledger at `path`; None keeps it in memory. Raises RunError if it cannot be opened."""
        self.failure: RunError | None = None
        """Why nothing more is written to the disk. The run should save and end."""
        self._path = path
        self._live: dict[int, _Row] = {}
        self._last_pass: dict[str, int] = {}
        self._drops: dict[str, Counter[tuple[int, DropReason]]] = {}
        """Task -> drops that put it back, by pass; of passes that may go on, because a rule may ask."""
        self._changed: dict[int, _Row] = {}
        """Rows that the writer does not have yet."""
        self._unstored: dict[int, _Row] = {}
        """The writer's: rows that are not in the database."""
        self._storing: asyncio.Future[None] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        with disk_errors("the ledger", path or Path()):
            self._database = sqlite3.connect(
                str(path) if path else ":memory:", timeout=LOCK_S, isolation_level=None, check_same_thread=False
            )
            # A commit survives the death of the process without waiting for the disk. A power failure may cost the last
            # rows, which a resume from a checkpoint discards anyway.
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
            self._last_id = self._read()

    def admit(self, task_id: str, *, task_pass: int | None = None, version: int) -> int:
        """A new group of this task; returns its id.

        A task without a pass is newly drawn: it begins the pass after the last one that it was in.
        """
        last = self._last_pass.get(task_id, -1)
        if task_pass is None:
            task_pass = last + 1
            self._forget_drops(task_id)
        self._last_pass[task_id] = max(last, task_pass)
        self._last_id += 1
        self._change(_Row(self._last_id, task_id, task_pass, GroupState.ADMITTED, None, None, version, None))
        return self._last_id

    def advance(self, group_id: int, state: GroupState, *, version: int | None = None) -> None:
        """Move a group to the state that follows its own; `version` is the one it was trained into."""
        before = self._live[group_id]
        assert _NEXT[before.state] is state, f"group {group_id} cannot go from {before.state} to {state}"
        self._change(before._replace(state=state, trained_version=version))

    def drop(self, group_id: int, reason: DropReason, detail: str = "") -> None:
        """End a live group without training it."""
        before = self._live[group_id]
        detail = detail[:2000].encode(errors="backslashreplace").decode()  # SQLite refuses halves of characters
        self._change(before._replace(state=GroupState.DROPPED, reason=reason, detail=detail))
        if reason.puts_task_back:
            self._drops.setdefault(before.task, Counter())[before.task_pass, reason] += 1

    def live(self, *states: GroupState) -> list[int]:
        """Ids of live groups, oldest first; of these states only, if any are given."""
        return [row.id for row in self._live.values() if not states or row.state in states]

    def task_of(self, group_id: int) -> tuple[str, int]:
        """(task id, pass) of a live group."""
        row = self._live[group_id]
        return row.task, row.task_pass

    def num_drops_of(self, task_id: str, task_pass: int, reason: DropReason) -> int:
        """How often a group of this task was dropped for this reason, one that puts it back, in a pass that goes on."""
        return self._drops.get(task_id, Counter())[task_pass, reason]

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_trained(self) -> int:
        return self._counts[GroupState.TRAINED, None]

    @property
    def num_training(self) -> int:
        return self._counts[GroupState.TRAINING, None]

    def counts(self) -> dict[str, int]:
        """Groups by state, dropped ones by reason ("dropped_stale"), and "admitted_total", their sum."""
        return _by_name(self._counts)

    async def flush(self) -> None:
        """Let other processes see everything so far, soon: it is written when the next flush returns.

        Raises RunError if the ledger cannot be written, with what SQLite said.
        """
        if self._storing is not None:
            await asyncio.shield(self._storing)
        self._hand_over()
        if self.failure is not None:
            raise self.failure

    def copy(self) -> Awaitable[bytes]:
        """The ledger of this moment as the bytes of a file that `Ledger` opens; what changes from now on is not in it.

        Awaiting it raises RunError if what is on disk cannot be read.
        """
        self._hand_over()
        return asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, self._serialize))

    def close(self) -> None:
        """Write what is left. Raises RunError if that fails, unless it has failed before: `flush` says that."""
        self._writer.shutdown()
        is_known = self.failure is not None
        self._store(self._changed)
        self._database.close()
        if self.failure is not None and not is_known:
            raise self.failure

    def _change(self, row: _Row) -> None:
        before = self._live.pop(row.id, None) if row.state in _ENDS else self._live.get(row.id)
        if before is not None:
            self._counts[before.state, None] -= 1
        self._counts[row.state, row.reason] += 1
        if row.state not in _ENDS:
            self._live[row.id] = row
        self._changed[row.id] = row
        if len(self._changed) >= ROWS_AT_ONCE and (self._storing is None or self._storing.done()):
            self._hand_over()

    def _hand_over(self) -> None:
        """Have the writer store what has changed. The batches are stored in order."""
        if self._changed:
            loop = asyncio.get_running_loop()
            self._storing = loop.run_in_executor(self._writer, self._store, self._changed)
            self._changed = {}

    def _store(self, rows: dict[int, _Row]) -> None:
        """In the writer's thread: add these rows and those that are still missing, all or none of them."""
        self._unstored |= rows
        if self.failure is not None or not self._unstored:
            return
        try:
            # Several at a time: a transaction for each would cost more than everything else that a group costs.
            with disk_errors("the ledger", self._path or Path()), self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(_PUT, self._unstored.values())
            self._unstored = {}
        except RunError as error:
            self.failure = error

    def _serialize(self) -> bytes:
        """In the writer's thread: what is in the database, with the rows that could not be stored there."""
        with disk_errors("the ledger", self._path or Path()):
            if not self._unstored:
                return self._database.serialize()
            with closing(sqlite3.connect(":memory:", isolation_level=None)) as whole:
                self._database.backup(whole)
                whole.executemany(_PUT, self._unstored.values())
                return whole.serialize()

    def _read(self) -> int:
        """Take up what is in the database; returns the last id."""
        database = self._database
        self._counts = _counted(database)
        for row in map(_Row._make, database.execute(_LIVE)):
            self._live[row.id] = row._replace(state=GroupState(row.state))
        self._last_pass = dict(database.execute("SELECT task, MAX(pass) FROM groups GROUP BY task"))
        for task, task_pass, reason, count in database.execute(_DROPS_OF_OPEN_PASSES):
            self._drops.setdefault(task, Counter())[task_pass, DropReason(reason)] = count
        return database.execute("SELECT COALESCE(MAX(id), 0) FROM groups").fetchone()[0]

    def _forget_drops(self, task_id: str) -> None:
        """Passes that are live go on, and so does one that was deferred (`TaskSampler.defer`): its drops count anew."""
        if (drops := self._drops.pop(task_id, None)) is None:
            return
        passes = {row.task_pass for row in self._live.values() if row.task == task_id}
        if kept := {key: count for key, count in drops.items() if key[0] in passes}:
            self._drops[task_id] = Counter(kept)


def counts_by_state(path: Path) -> dict[str, int]:
    """`Ledger.counts` of a ledger on disk, read only. Raises ValueError when there is no ledger at `path`."""
    if not path.is_file():
        raise ValueError(f"no ledger at {path}; give the directory of a run")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return _by_name(_counted(database))


def _counted(database: sqlite3.Connection) -> Counter[tuple[str, str | None]]:
    """Groups by state and reason."""
    rows = database.execute("SELECT state, reason, COUNT(*) FROM groups GROUP BY state, reason")
    return Counter({(state, reason): count for state, reason, count in rows})


def _by_name(counts: Counter[tuple[str, str | None]]) -> dict[str, int]:
    by_state = {state.value: counts[state, None] for state in GroupState if state is not GroupState.DROPPED}
    by_reason = {f"dropped_{reason}": counts[GroupState.DROPPED, reason] for reason in DropReason}
    return {**by_state, **by_reason, "admitted_total": counts.total()}
