"""A real run that starts more groups and episodes than it takes, in a world where some are slow."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from children import TIMEOUT_S, wait_for
from ledgers import trained_tasks
from test_run import running

from rlflow.groups.ledger import counts_by_state
from rlflow.telemetry import metrics

pytestmark = pytest.mark.slow

WORLD = """
import asyncio
from collections import Counter

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.types import Task

resets = Counter()


def tasks():
    return [Task(id=f"t{i}", prompt=({"role": "user", "content": f"{i} ="},), answer=str(i)) for i in range(8)]


class World(SingleTurn):
    async def reset(self, task):
        resets[task.id] += 1
        if resets[task.id] % 3 == 1:
            await asyncio.Event().wait()
        await asyncio.sleep(2 * (task.id < "t4"))
        return await super().reset(task)


def load():
    return EnvironmentSpec(tasks=tasks, build=World)
"""
"""One of three episodes of each group never begins, and half of the tasks take two seconds."""


def test_slow_groups_and_episodes_are_cancelled_and_every_task_is_trained_once(tmp_path: Path) -> None:
    """Eight tasks in eight steps of one group: a pass. In every other step one of two groups is cancelled, and the next
    plays its task alone. The run is killed in between."""
    run, world = tmp_path / "run", tmp_path / "world.py"
    world.write_text(WORLD)
    settings = [
        f"env.name={world}:load", "run.steps=8", "run.checkpoint_every=3", "algorithm.groups_per_step=1",
        "algorithm.group_size=2", "rollout.oversample=2", "rollout.oversample_episodes=1.5",
    ]  # fmt: skip
    with running(run, *settings) as process:
        wait_for(process, "step 5/8")
        process.kill()
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    with running(run, *settings) as process:
        wait_for(process, "resumed at step 3 of 8")
        wait_for(process, "report: ")
        assert process.wait(timeout=TIMEOUT_S) == 0
    counts = {name: count for name, count in counts_by_state(run / "ledger.db").items() if count}
    assert counts == {"trained": 8, "dropped_slow": 4, "admitted_total": 12}
    assert sorted(trained_tasks(run)) == [f"t{index}" for index in range(8)]
    for record in metrics.read(run / "metrics.jsonl"):
        played = sum(record.get(f"episodes/{end}", 0) for end in ("completed", "truncated_length"))
        assert played == 2 * record["episodes/cancelled"] > 0
