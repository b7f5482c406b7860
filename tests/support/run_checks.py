"""Whether a run kept its promises, judged by what it left: its directory, what it printed, and the world around it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from world import Observation, left_behind

from rlflow.groups.ledger import DropReason
from rlflow.telemetry import metrics

GIVEN_UP_AFTER = 3
"""Groups of one task that fail in one pass before the task is given up for it."""
_BAD_WORDS = {
    "Traceback (most recent call last)": "a traceback was printed",
    "does not compute with version": "the weights of an engine differ from the trainer's",
    "engine and trainer disagree at the same version": "engine and trainer disagree at the same version",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Expected:
    """What the settings of a run promise."""

    num_tasks: int
    groups_per_step: int
    max_versions: int


@dataclass(kw_only=True, slots=True, frozen=True)
class _Row:
    """A group in the ledger."""

    task: str
    task_pass: int
    state: str
    reason: str | None


def violations(
    run: Path, expected: Expected, before: Observation, after: Observation, output: str, *, is_over: bool = True
) -> list[str]:
    """One line for each promise that was broken; none for a run that is in order.

    before, after: the world before the run began and when all of its processes should have ended.
    output: what the run has printed, those parts included that were killed.
    is_over: False while the run goes on: groups may be under way, and the last steps are on their way to the files.
    """
    records = metrics.read(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    rows = _rows(run / "ledger.db")
    found = [*_of_steps(records, expected), *_of_groups(rows)]
    found += [meaning for words, meaning in _BAD_WORDS.items() if words in output]
    if (run / "traceback.txt").exists():
        found.append("an error that nobody wrote for people is in traceback.txt")
    if is_over:
        found += _of_end(rows, expected, len(records)) + _of_passes(rows, expected)
        found += [f"left behind: {each}" for each in left_behind(before, after)]
    return found


def given_up(run: Path) -> list[tuple[int, str]]:
    """(pass, task) of what was not trained in a pass, for a reason that the ledger gives and a person should know."""
    return sorted(_failed_for_good(_rows(run / "ledger.db")))


def _rows(ledger: Path) -> list[_Row]:
    if not ledger.exists():
        return []
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT task, pass, state, reason FROM groups ORDER BY id").fetchall()
    return [_Row(task=task, task_pass=number, state=state, reason=reason) for task, number, state, reason in found]


def _of_steps(records: list[dict[str, float]], expected: Expected) -> list[str]:
    found = []
    steps = [record["step"] for record in records]
    if steps != list(range(1, len(steps) + 1)):
        wrong = next(index for index, step in enumerate(steps, start=1) if step != index)
        found.append(f"record {wrong} of metrics.jsonl is of step {steps[wrong - 1]}: steps are missing or there twice")
    version = 0
    for record in records:
        version += not record["update_skipped"]
        if record["version"] != version:
            found.append(f"step {record['step']} has version {record['version']}, but {version} updates were made")
            break
    for record in records:
        if record["staleness/max"] > expected.max_versions:
            found.append(f"step {record['step']} used tokens that were {record['staleness/max']} versions old")
    return found


def _of_groups(rows: list[_Row]) -> list[str]:
    trained = Counter((row.task_pass, row.task) for row in rows if row.state == "trained")
    return [f"{task} was trained {n} times in pass {number}" for (number, task), n in trained.items() if n > 1]


def _of_end(rows: list[_Row], expected: Expected, num_steps: int) -> list[str]:
    found = []
    states = Counter(row.state for row in rows)
    if under_way := {state: n for state, n in states.items() if state not in ("trained", "dropped", "ready")}:
        found.append(f"groups did not end: {under_way}")
    if without := sum(row.state == "dropped" and row.reason is None for row in rows):
        found.append(f"{without} groups were dropped without a reason")
    wanted = expected.groups_per_step * num_steps
    if states["trained"] != wanted:
        found.append(f"the ledger has {states['trained']} trained groups, the {num_steps} steps had {wanted}")
    return found


def _of_passes(rows: list[_Row], expected: Expected) -> list[str]:
    """Every pass but the last two, which may be under way, has every task: trained, or with a final reason."""
    ended = {(row.task_pass, row.task) for row in rows if row.state == "trained" or _is_final(row)}
    ended |= _failed_for_good(rows)
    last = max((row.task_pass for row in rows), default=0)
    numbers = Counter(number for number, _ in ended)
    return [
        f"pass {number} has {numbers[number]} of {expected.num_tasks} tasks"
        for number in range(last - 1)
        if numbers[number] != expected.num_tasks
    ]


def _is_final(row: _Row) -> bool:
    return row.reason is not None and not DropReason(row.reason).puts_task_back


def _failed_for_good(rows: list[_Row]) -> set[tuple[int, str]]:
    failed = Counter((row.task_pass, row.task) for row in rows if row.reason == DropReason.FAILED)
    without_verdict = {(row.task_pass, row.task) for row in rows if row.reason == DropReason.NO_VERDICT}
    return {each for each, n in failed.items() if n >= GIVEN_UP_AFTER} | without_verdict
