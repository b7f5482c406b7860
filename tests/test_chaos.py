"""Faults on whole runs, and whether what judges them would notice a run that lost something."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_plan import FULL, PLAIN, make_fault, plan, shortened
from run_checks import Expected, given_up, violations
from world import MARK, Observation, has_worlds, in_world, left_behind

from rlflow.groups.ledger import DropReason, GroupState, Ledger

ROOT = Path(__file__).parents[1]
NOTHING = Observation(files=frozenset(), shared_memory=frozenset(), listeners=frozenset(), processes=frozenset())
EXPECTED = Expected(num_tasks=2, groups_per_step=2, max_versions=1)
LIFE = [GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING, GroupState.TRAINED]
SHORT = ("kill vllm", "kill runner", "kill scoring", "kill environment", "pause trainer", "nan")
needs_worlds = pytest.mark.skipif(not has_worlds(), reason="a world needs namespaces")


def train(ledger: Ledger, task: str, task_pass: int) -> None:
    group = ledger.admit(task, task_pass=task_pass, version=0)
    for state in LIFE:
        ledger.advance(group, state, version=0)


def drop(ledger: Ledger, task: str, task_pass: int, reason: DropReason) -> None:
    ledger.drop(ledger.admit(task, task_pass=task_pass, version=0), reason)


def record(step: int, **changes: float) -> dict[str, float]:
    return {"step": step, "version": step, "update_skipped": 0, "staleness/max": 1, **changes}


def make_run(folder: Path, fill: Callable[[Ledger], None], records: list[dict[str, float]]) -> Path:
    ledger = Ledger(folder / "ledger.db")
    fill(ledger)
    ledger.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def three_passes(ledger: Ledger) -> None:
    for task_pass in range(3):
        for task in ("a", "b"):
            train(ledger, task, task_pass)


THREE = [record(1), record(2), record(3)]


def test_a_run_in_order_breaks_no_promise(tmp_path: Path) -> None:
    run = make_run(tmp_path, three_passes, THREE)
    assert violations(run, EXPECTED, NOTHING, NOTHING, "step 1/3\n") == []


def test_what_is_put_back_and_a_skipped_update_are_in_order(tmp_path: Path) -> None:
    def fill(ledger: Ledger) -> None:
        drop(ledger, "a", 0, DropReason.STALE)
        drop(ledger, "b", 0, DropReason.FAILED)
        three_passes(ledger)

    records = [record(1), record(2, version=1, update_skipped=1), record(3, version=2)]
    assert violations(make_run(tmp_path, fill, records), EXPECTED, NOTHING, NOTHING, "") == []


def test_a_task_that_was_given_up_is_not_missing_but_named(tmp_path: Path) -> None:
    def fill(ledger: Ledger) -> None:
        for _ in range(3):
            drop(ledger, "a", 0, DropReason.FAILED)
        drop(ledger, "b", 0, DropReason.NO_VERDICT)
        for task_pass in (1, 2, 3):
            for task in ("a", "b"):
                train(ledger, task, task_pass)

    run = make_run(tmp_path, fill, THREE)
    assert violations(run, EXPECTED, NOTHING, NOTHING, "") == []
    assert given_up(run) == [(0, "a"), (0, "b")]


def twice(ledger: Ledger) -> None:
    three_passes(ledger)
    train(ledger, "a", 1)
    train(ledger, "c", 2)


def missing(ledger: Ledger) -> None:
    for task, task_pass in (("a", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", 2)):
        train(ledger, task, task_pass)


def unfinished(ledger: Ledger) -> None:
    three_passes(ledger)
    ledger.advance(ledger.admit("a", task_pass=3, version=0), GroupState.RUNNING)


@pytest.mark.parametrize(
    ("fill", "records", "output", "found"),
    [
        (twice, [*THREE, record(4)], "", ["a was trained 2 times in pass 1"]),
        (missing, THREE, "", ["pass 0 has 1 of 2 tasks"]),
        (unfinished, THREE, "", ["groups did not end: {'running': 1}"]),
        (three_passes, THREE[:2], "", ["the ledger has 6 trained groups, the 2 steps had 4"]),
        (
            three_passes,
            [record(1), record(3), record(3)],
            "",
            [
                "record 2 of metrics.jsonl is of step 3: steps are missing or there twice",
                "step 3 has version 3, but 2 updates were made",
            ],
        ),
        (three_passes, [*THREE[:2], record(3, version=2)], "", ["step 3 has version 2, but 3 updates were made"]),
        (
            three_passes,
            [record(1), record(2, **{"staleness/max": 2}), record(3)],
            "",
            ["step 2 used tokens that were 2 versions old"],
        ),
        (three_passes, THREE, "Traceback (most recent call last):\n", ["a traceback was printed"]),
        (
            three_passes,
            THREE,
            "ALARM: rollout engine 0 does not compute with version 3 as it was staged",
            ["the weights of an engine differ from the trainer's"],
        ),
    ],
)
def test_a_broken_promise_is_found(
    tmp_path: Path,
    fill: Callable[[Ledger], None],
    records: list[dict[str, float]],
    output: str,
    found: list[str],
) -> None:
    assert violations(make_run(tmp_path, fill, records), EXPECTED, NOTHING, NOTHING, output) == found


def test_a_group_without_a_reason_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, three_passes, THREE)
    database = sqlite3.connect(run / "ledger.db", isolation_level=None)
    database.execute("INSERT INTO groups (task, pass, state, admitted_version) VALUES ('a', 3, 'dropped', 0)")
    database.close()
    assert violations(run, EXPECTED, NOTHING, NOTHING, "") == ["1 groups were dropped without a reason"]


def test_an_error_that_nobody_wrote_for_people_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, three_passes, THREE)
    (run / "traceback.txt").write_text("KeyError")
    found = ["an error that nobody wrote for people is in traceback.txt"]
    assert violations(run, EXPECTED, NOTHING, NOTHING, "") == found


def test_what_was_left_behind_is_found(tmp_path: Path) -> None:
    before = Observation(
        files=frozenset({"old"}), shared_memory=frozenset({"s"}), listeners=frozenset(), processes=frozenset({"1 init"})
    )
    after = Observation(
        files=frozenset({"old", "rlflow-ray-x"}),
        shared_memory=frozenset({"arena"}),
        listeners=frozenset({"tcp 127.0.0.1:80"}),
        processes=frozenset({"1 init", "9 sh"}),
    )
    left = ["file in /tmp: rlflow-ray-x", "shared memory: arena", "listening socket: tcp 127.0.0.1:80", "process: 9 sh"]
    assert left_behind(before, after) == left
    run = make_run(tmp_path, three_passes, THREE)
    assert violations(run, EXPECTED, before, after, "") == [f"left behind: {each}" for each in left]
    assert violations(run, EXPECTED, before, after, "", is_over=False) == []


def test_a_run_under_way_may_have_groups_under_way(tmp_path: Path) -> None:
    run = make_run(tmp_path, unfinished, THREE[:2])
    assert violations(run, EXPECTED, NOTHING, NOTHING, "", is_over=False) == []


def test_a_seed_decides_every_fault_and_another_seed_decides_otherwise() -> None:
    faults = plan(1)
    assert faults == plan(1)
    assert [fault.number for fault in faults] == list(range(len(faults)))
    assert plan(1, [FULL]) == [fault for fault in faults if fault.scenario == "full"]
    assert [fault.name for fault in plan(2)] != [fault.name for fault in faults]
    assert make_fault(1, "plain", 3, "kill engine") != make_fault(2, "plain", 3, "kill engine")


def test_a_whole_plan_has_a_hundred_kills_and_sixty_other_faults() -> None:
    faults = plan(1)
    kills = [fault for fault in faults if fault.action == "kill"]
    assert len(kills) == 100
    assert len(faults) - len(kills) >= 60
    assert Counter(fault.name for fault in faults if fault.scenario == "plain" and fault.action == "kill") == {
        f"kill {kind}": count for kind, count in PLAIN.kills.items()
    }


def test_fewer_faults_are_of_as_many_kinds_as_possible() -> None:
    some = shortened(plan(1, [PLAIN]), 30)
    assert len(some) == len({fault.name for fault in some}) == 30
    assert some == sorted(some, key=lambda fault: fault.number)


@pytest.mark.slow
@needs_worlds
def test_what_a_world_is_left_with_is_seen() -> None:
    """A file, shared memory, a socket and a process that a command leaves; nothing of them is there outside."""
    code = (
        "import json, subprocess, sys; from world import observe, left_behind; before = observe();"
        "subprocess.run([sys.executable, '-c', sys.argv[1]]);"
        "print(json.dumps(left_behind(before, observe())))"
    )
    leaves = (
        "import os, socket\n"
        "open('/tmp/one', 'w'); open('/dev/shm/two', 'w')\n"
        "server = socket.create_server(('127.0.0.1', 4321))\n"
        "server.set_inheritable(True)\n"
        "if os.fork() == 0:\n    os.execvp('sleep', ['sleep', '60'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    command = in_world([sys.executable, "-c", code, leaves], ROOT)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    *found, process = json.loads(done.stdout.splitlines()[-1])
    assert found == ["file in /tmp: one", "shared memory: two", "listening socket: tcp 127.0.0.1:4321"]
    assert process.endswith(" sleep 60")
    assert not Path("/tmp/one").exists() and MARK not in os.environ


def numbers_of(*names: str) -> list[str]:
    """The first fault of each of these kinds in the run on one machine."""
    faults = plan(1, [PLAIN])
    return [str(next(fault.number for fault in faults if fault.name == name)) for name in names]


def play(*options: str, timeout_s: float) -> dict[str, Any]:
    """What the last line says of the faults with these options."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_worlds
def test_faults_do_no_harm_to_a_stand_in_that_keeps_its_promises() -> None:
    names = ["kill raylet", "damage", "nan", "fill_disk", "read_only", "terminate_while_saving", "close_output"]
    found = play("--toy", "none", "--only", *numbers_of(*names), timeout_s=600)
    assert (found["broken"], found["left_behind"]) == ([], [])
    assert (found["kills"], found["other_faults"]) == (1, 6)


@pytest.mark.slow
@needs_worlds
def test_chaos_finds_what_a_stand_in_does_wrong() -> None:
    found = play("--toy", "twice", "--only", *numbers_of("hang runner"), timeout_s=600)
    assert "plain: t0 was trained 2 times in pass 0" in found["broken"]
    assert "plain: pass 0 has 15 of 16 tasks" in found["broken"]
    (number,) = numbers_of("kill runner")
    found = play("--toy", "leaves", "--only", number, timeout_s=600)
    assert found["broken"] == []
    (left,) = found["left_behind"]
    assert left.startswith(f"fault {number} (kill runner): file in /tmp: toy-")


@pytest.mark.slow
@needs_worlds
def test_a_run_outlives_six_faults_and_loses_nothing() -> None:
    found = play("--only", *numbers_of(*SHORT), timeout_s=600)
    assert (found["broken"], found["left_behind"]) == ([], [])
    assert found["kills"] + found["other_faults"] == 6


@pytest.mark.slow
@pytest.mark.proof
@needs_worlds
def test_runs_outlive_a_hundred_kills_and_sixty_other_faults_and_lose_nothing() -> None:
    found = play(timeout_s=4 * 3600)
    assert (found["broken"], found["left_behind"]) == ([], [])
    assert found["kills"] == 100
    assert found["other_faults"] >= 60
