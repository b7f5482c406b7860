"""Runs over several nodes of Ray. Some are killed with all of their processes, as a machine that loses its power."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import TIMEOUT_S, ended_after, wait_for
from ray_nodes import RayNodes, has_networks

from rlflow.groups.ledger import counts_by_state
from rlflow.telemetry import metrics

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
ENGINES = "{processes: [engine]}"


@contextmanager
def running(nodes: RayNodes, run: Path, *settings: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose driver is on the head."""
    command = [
        sys.executable, "-m", "rlflow", "train", "recipe=smoke", "cluster=ray", f"cluster.address={nodes.address}",
        f"run.dir={run}", "weights.transport=p2p", "run.show_samples_every=1000000", *settings,
    ]  # fmt: skip
    with ended_after(nodes.on_head(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as process:
        yield process


def slow_reward(folder: Path) -> str:
    """One that leaves the cores of this machine to the processes that start meanwhile."""
    file = folder / "slow.py"
    file.write_text(
        "import time\n\ndef slow(completion):\n    time.sleep(0.2)\n    return float(len(completion) % 3)\n"
    )
    return f"{file}:slow"


def check_ledger(run: Path, num_tasks: int) -> None:
    """Every group ended once; in all passes but the last two, every task was trained once or given up for a reason."""
    counts = counts_by_state(run / "ledger.db")
    total = counts.pop("admitted_total")
    assert sum(counts.values()) == total
    assert counts["running"] == counts["scored"] == counts["training"] == 0
    assert counts["trained"] == 2 * metrics.read(run / "metrics.jsonl")[-1]["step"]
    database = sqlite3.connect(run / "ledger.db")
    trained = Counter(database.execute("SELECT pass, task FROM groups WHERE state = 'trained'").fetchall())
    given_up = {
        (each, task)
        for each, task, reason, count in database.execute(
            "SELECT pass, task, reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY pass, task, reason"
        ).fetchall()
        if reason == "no_verdict" or (reason == "failed" and count >= 3)
    }
    database.close()
    assert set(trained.values()) == {1}
    last = max(each for each, _ in trained)
    for each in range(last - 1):
        assert sum(number == each for number, _ in trained.keys() | given_up) == num_tasks


def test_ranks_and_engines_on_machines_of_their_own_train_together(tmp_path: Path) -> None:
    """Where networks of one's own need no more than this user may, ranks and engines meet over one.

    Runners and rewards have two machines, and each of these has one of them.
    """
    run = tmp_path / "run"
    with RayNodes(with_networks=has_networks()) as nodes:
        nodes.add("rollout", "rollout", cpus=1)
        nodes.add("training", "training", cpus=1)
        nodes.add("others", "others")
        settings = [
            f"+cluster.pools={{rollout: {ENGINES}, training: {{processes: [trainer]}}, others: {{}}}}",
            "rollout.engines=2", "trainer.ranks=2", "run.steps=2", "weights.verify=full", "env.args.size=4",
        ]  # fmt: skip
        with running(nodes, run, *settings) as process:
            for index in range(2):  # each in a line of its own
                wait_for(process, f"runner {index}, reward {index}\n")
            wait_for(process, "report: ")
            assert process.wait(TIMEOUT_S) == 0
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == [1, 2]
    check_ledger(run, num_tasks=4)


@pytest.mark.proof
def test_a_run_outlives_the_machines_of_an_engine_and_of_its_trainer(tmp_path: Path) -> None:
    """As above, and both kinds of machine are lost and replaced."""
    run = tmp_path / "run"
    with RayNodes(with_networks=has_networks()) as nodes:
        engines = nodes.add("rollout", "rollout", cpus=1)
        ranks = nodes.add("training", "training", cpus=1)
        nodes.add("others")
        settings = [
            f"+cluster.pools={{rollout: {ENGINES}, training: {{processes: [trainer]}}, others: {{}}}}",
            "rollout.engines=2", "trainer.ranks=2", "run.steps=1000000", "run.checkpoint_every=4",
            "staleness.max_versions=1", "weights.verify=full", "env.args.size=16",
            f"reward.function={slow_reward(tmp_path)}",
        ]  # fmt: skip
        with running(nodes, run, *settings) as process:
            wait_for(process, "step 3/")
            engines[0].kill()
            alarm = wait_for(process, "it is started again")
            lost = alarm.split("rollout engine ")[1][0]
            wait_for(process, "step ")
            nodes.add("rollout", cpus=1)
            wait_for(process, f"rollout engine {lost} serves again, ")
            ranks[1].kill()
            wait_for(process, "done again (restart 1, of 3")
            nodes.add("training", cpus=1)
            wait_for(process, "training again ")
            wait_for(process, "saved ")
            os.killpg(process.pid, signal.SIGINT)
            wait_for(process, "report: ")
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGINT
    check_ledger(run, num_tasks=16)


def test_what_a_lost_machine_had_stored_is_known_to_be_lost() -> None:
    """Also: a runner that died gets no group until Ray has found it another machine."""
    with RayNodes() as nodes:
        (node,) = nodes.add("rollout", cpus=1)
        command = [sys.executable, str(SUPPORT / "lost_payloads.py"), nodes.address]
        process = nodes.on_head(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        wait_for(process, "kill")
        node.kill()
        print(file=process.stdin, flush=True)
        wait_for(process, "add")
        nodes.add("rollout", cpus=1)
        print(file=process.stdin, flush=True)
        found = json.loads(wait_for(process, "{"))
        process.communicate(timeout=TIMEOUT_S)
    assert found.pop("error").startswith("the episode runner died")
    assert found == {"before": False, "small": False, "together": True, "waits": True, "again": False}


def test_what_fits_is_reserved_and_a_restart_waits_until_it_fits_again() -> None:
    """Each machine has just the CPUs that it needs: three ranks on one, two engines and the rest on the other."""
    with RayNodes() as nodes:
        there = {node.ip: node for node in nodes.add("any", "any", cpus=3)}
        command = [sys.executable, str(SUPPORT / "reserved_machines.py"), nodes.address]
        process = nodes.on_head(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        lost = wait_for(process, "kill").split()[1]
        there.pop(lost).kill()
        print(file=process.stdin, flush=True)
        assert wait_for(process, "now ") == "now 0\n"
        (added,) = nodes.add("any", cpus=3)
        before, after = json.loads(wait_for(process, "["))
        process.communicate(timeout=TIMEOUT_S)
    (kept,) = there
    assert before == {"trainer": [kept], "engine": [lost], "runner": [lost], "reward": [lost]}
    assert set(map(tuple, after.values())) == {(kept,), (added.ip,)} and after["trainer"] != after["engine"]


@pytest.mark.skipif(not has_networks(), reason="hiding a folder needs root")
def test_a_machine_that_does_not_see_the_run_directory_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with RayNodes() as nodes:
        (node,) = nodes.add("training", cpus=3, hides=run)
        with running(nodes, run) as process:
            wait_for(process, f"error: the machine {node.ip} does not see run.dir {run}; put it on a file system")
            assert process.wait(TIMEOUT_S) == 2


def test_a_machine_with_other_packages_is_named(tmp_path: Path) -> None:
    others = tmp_path / "packages"
    about = others / "transformers-1.2.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
    with RayNodes() as nodes:
        (node,) = nodes.add("training", cpus=3, finds_first=others)
        with running(nodes, tmp_path / "run") as process:
            wait_for(process, f"error: packages differ: {node.ip} has transformers 1.2.3, where the driver has ")
            assert process.wait(TIMEOUT_S) == 2
