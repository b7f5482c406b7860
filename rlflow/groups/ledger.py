"""The life of every group; the only place that changes a group's state.

    admitted -> running -> scored -> ready -> training -> trained
        |          |          |        |         |
        +----------+----------+--------+---------+--> dropped(reason)

Rules: every admitted group ends exactly once, and takes no other transition than these. Memory does not grow with the
run: it holds the live groups and one count for each state. Everything is in SQLite, so that a person can ask what
became of a task during the run and after it.
"""

import sqlite3
from collections import Counter
from enum import StrEnum
from pathlib import Path


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

    @property
    def puts_task_back(self) -> bool:
        """Whether the task is tried again; the other reasons are final."""
        return self in (DropReason.STALE, DropReason.FAILED, DropReason.CANCELLED)


WRITES_AT_ONCE = 64
"""Changes that a killed process can lose at most. That does no harm: a resume begins with a checkpoint's copy."""

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


class Ledger:
    """Groups by id. Methods raise AssertionError for a transition that is not drawn above."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or create the ledger at `path`; None keeps it in memory."""
        self._database = sqlite3.connect(str(path) if path else ":memory:", isolation_level=None)
        # A commit survives the death of the process without waiting for the disk. A power failure may cost the last
        # rows, which a resume from a checkpoint discards anyway.
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._num_unwritten = 0
        self._database.executescript(_SCHEMA)
        self._live: dict[int, GroupState] = {}
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        for group_id, state, reason in self._database.execute("SELECT id, state, reason FROM groups"):
            self._count(GroupState(state), reason, 1)
            if state not in (GroupState.TRAINED, GroupState.DROPPED):
                self._live[group_id] = GroupState(state)
        row = self._database.execute("SELECT COALESCE(MAX(id), 0) FROM groups").fetchone()
        self._last_id: int = row[0]

    def admit(self, task_id: str, *, task_pass: int | None = None, version: int) -> int:
        """A new group of this task; returns its id.

        A task without a pass is newly drawn: it begins the pass after the last one that it was in.
        """
        if task_pass is None:
            last = self._database.execute("SELECT MAX(pass) FROM groups WHERE task = ?", (task_id,)).fetchone()[0]
            task_pass = 0 if last is None else last + 1
        self._last_id += 1
        self._write(
            "INSERT INTO groups (id, task, pass, state, admitted_version) VALUES (?, ?, ?, ?, ?)",
            (self._last_id, task_id, task_pass, GroupState.ADMITTED, version),
        )
        self._live[self._last_id] = GroupState.ADMITTED
        self._count(GroupState.ADMITTED, None, 1)
        return self._last_id

    def advance(self, group_id: int, state: GroupState, *, version: int | None = None) -> None:
        """Move a group to the state that follows its own; `version` is the one it was trained into."""
        before = self._live[group_id]
        assert _NEXT[before] is state, f"group {group_id} cannot go from {before} to {state}"
        self._write("UPDATE groups SET state = ?, trained_version = ? WHERE id = ?", (state, version, group_id))
        self._leave(group_id, before, state, None)

    def drop(self, group_id: int, reason: DropReason, detail: str = "") -> None:
        """End a live group without training it."""
        before = self._live[group_id]
        self._write(
            "UPDATE groups SET state = ?, reason = ?, detail = ? WHERE id = ?",
            (GroupState.DROPPED, reason, detail[:2000], group_id),
        )
        self._leave(group_id, before, GroupState.DROPPED, reason)

    def live(self, *states: GroupState) -> list[int]:
        """Ids of live groups, oldest first; of these states only, if any are given."""
        return [group_id for group_id, state in self._live.items() if not states or state in states]

    def task_of(self, group_id: int) -> tuple[str, int]:
        """(task id, pass) of a group."""
        task_id, task_pass = self._database.execute(
            "SELECT task, pass FROM groups WHERE id = ?", (group_id,)
        ).fetchone()
        return task_id, task_pass

    def num_drops_of(self, task_id: str, task_pass: int, reason: DropReason) -> int:
        """How often a group of this task was dropped for this reason in this pass."""
        row = self._database.execute(
            "SELECT COUNT(*) FROM groups WHERE task = ? AND pass = ? AND reason = ?", (task_id, task_pass, reason)
        ).fetchone()
        return row[0]

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_trained(self) -> int:
        return self._counts[GroupState.TRAINED]

    def counts(self) -> dict[str, int]:
        """Groups by state, dropped ones by reason ("dropped_stale"), and "admitted_total", their sum."""
        return _with_total(self._counts, self._dropped)

    def flush(self) -> None:
        """Let other processes see everything so far."""
        if self._num_unwritten:
            self._database.execute("COMMIT")
            self._num_unwritten = 0

    def copy(self) -> bytes:
        """The ledger of this moment as the bytes of a file that `Ledger` opens."""
        self.flush()
        return self._database.serialize()

    def close(self) -> None:
        self.flush()
        self._database.close()

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        """Several at a time: a transaction for each would be half of what the driver does for a group."""
        if not self._num_unwritten:
            self._database.execute("BEGIN")
        self._database.execute(statement, values)
        self._num_unwritten += 1
        if self._num_unwritten >= WRITES_AT_ONCE:
            self.flush()

    def _leave(self, group_id: int, before: GroupState, after: GroupState, reason: str | None) -> None:
        self._count(before, None, -1)
        self._count(after, reason, 1)
        if after in (GroupState.TRAINED, GroupState.DROPPED):
            del self._live[group_id]
        else:
            self._live[group_id] = after

    def _count(self, state: GroupState, reason: str | None, change: int) -> None:
        self._counts[state] += change
        if reason is not None:
            self._dropped[reason] += change


def counts_by_state(path: Path) -> dict[str, int]:
    """`Ledger.counts` of a ledger on disk, read only. Raises ValueError when there is no ledger at `path`."""
    if not path.is_file():
        raise ValueError(f"no ledger at {path}; give the directory of a run")
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT state, reason, COUNT(*) FROM groups GROUP BY state, reason").fetchall()
    finally:
        database.close()
    states: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for state, reason, count in rows:
        states[state] += count
        if reason is not None:
            dropped[reason] += count
    return _with_total(states, dropped)


def _with_total(states: Counter[str], dropped: Counter[str]) -> dict[str, int]:
    by_state = {state.value: states[state] for state in GroupState if state is not GroupState.DROPPED}
    by_reason = {f"dropped_{reason}": dropped[reason] for reason in DropReason}
    return {**by_state, **by_reason, "admitted_total": states.total()}
