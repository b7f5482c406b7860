"""What it costs a run to lose a machine: one run of the tiny model over five nodes of Ray on this machine.

    python benchmarks/lost_nodes.py

Each kind of node is killed with all of its processes, and a new one is added at once; the last line is a JSON object.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ray_nodes import Node, RayNodes  # pyright: ignore[reportMissingImports]

POOLS = "+cluster.pools={rollout: {processes: [engine]}, play: {processes: [runner, reward]}, training: {}}"
SETTINGS = (
    "rollout.engines=2", "weights.transport=p2p", "staleness.max_versions=1", "algorithm.group_size=32",
    "run.steps=1000000", "run.checkpoint_every=10", "run.show_samples_every=1000000",
)  # fmt: skip
VICTIMS = {"engine": ("rollout", "EngineActor"), "runner": ("play", "RunnerActor"), "trainer": ("training", "TrainerW")}
WAIT_S = 600.0


@dataclass(kw_only=True, slots=True)
class Cost:
    killed: str
    seconds_to_next_step: float
    seconds_to_full_strength: float
    groups_lost: int
    steps_repeated: int


@dataclass(slots=True)
class Output:
    """What a run prints, with the time of each line; read by a thread, so that the run never waits for it."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    added: threading.Condition = field(default_factory=threading.Condition)

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.added:
                self.lines.append((time.monotonic(), line))
                self.added.notify_all()

    def wait_for(self, pattern: str, start: int = 0) -> tuple[float, str]:
        """Time and text of the first line from number `start` on that has the pattern."""
        with self.added:
            found = self.added.wait_for(lambda: self._first(pattern, start), WAIT_S)
        assert found, f"the run did not print {pattern!r}: {''.join(line for _, line in self.lines[-20:])}"
        return found

    def _first(self, pattern: str, start: int) -> tuple[float, str] | None:
        return next((each for each in self.lines[start:] if re.search(pattern, each[1])), None)


def lose(kind: str, nodes: RayNodes, there: list[Node], output: Output) -> Cost:
    """Kill the node of one process of this kind, and add one like it."""
    pool, actor = VICTIMS[kind]
    victim = next(node for node in there if any(actor in title for title in node.titles()))
    first = start = len(output.lines)
    began_s = time.monotonic()
    victim.kill()
    there.remove(victim)
    there += nodes.add(pool, cpus=1)
    repeated, full = 0, "^step "
    if kind == "trainer":
        _, line = output.wait_for("restart 1", start)
        repeated = int(re.findall(r"so that (\d+) are", line)[0])
        start, full = len(output.lines), "is done again, |^saved "
    elif kind == "engine":
        _, line = output.wait_for("is started again", start)
        start, full = len(output.lines), "serves again, "
    next_s, _ = output.wait_for("^step ", start)
    full_s, _ = output.wait_for(full, start)
    return Cost(
        killed=f"node with the {kind}",
        seconds_to_next_step=round(next_s - began_s, 1),
        seconds_to_full_strength=round(full_s - began_s, 1),
        groups_lost=sum("dropped (failed)" in line for _, line in output.lines[first:]),
        steps_repeated=repeated,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, RayNodes() as nodes:
        run = Path(folder) / "run"
        there = nodes.add("rollout", "rollout", "play", "training", cpus=1)
        command = [
            sys.executable, "-m", "rlflow", "train", "recipe=smoke", "cluster=ray", f"cluster.address={nodes.address}",
            f"run.dir={run}", POOLS, *SETTINGS,
        ]  # fmt: skip
        process = nodes.on_head(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = Output()
        threading.Thread(target=output.read, args=(process,), daemon=True).start()
        output.wait_for("^step 12/")
        costs = [lose(kind, nodes, there, output) for kind in VICTIMS]
        os.killpg(process.pid, signal.SIGINT)
        process.wait(WAIT_S)
    names = list(asdict(costs[0]))
    print("  ".join(f"{name.replace('_', ' '):>24}" for name in names))
    for cost in costs:
        print("  ".join(f"{value!s:>24}" for value in asdict(cost).values()))
    print(json.dumps([asdict(cost) for cost in costs]))


if __name__ == "__main__":
    main()
