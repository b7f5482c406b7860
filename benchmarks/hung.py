"""What a hung process costs a run, beside a killed one: a table from real runs of the tiny model on this machine.

    python benchmarks/hung.py                      every target, each stopped (SIGSTOP) and killed (SIGKILL)
    python benchmarks/hung.py "rollout engine 0"   only this one
    python benchmarks/hung.py --alarms 20          20 short runs beside four busy loops, without a false alarm

Noticed: seconds until the process was gone. Lost: seconds in which the run came no further, by its usual pace.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ray_nodes import RayNodes  # pyright: ignore[reportMissingImports]

SETTINGS = (
    "run.steps=1000000", "run.checkpoint_every=5", "run.show_samples_every=1000000", "staleness.max_versions=1",
    "algorithm.advantage=gae", "critic.learning_rate=1e-2", "algorithm.kl_coefficient=0.05", "env.processes=2",
    "reward.workers=1", "algorithm.group_size=8",
)  # fmt: skip
TARGETS = (
    "rollout engine 0", "vLLM core", "episode runner 0", "environment process", "reward", "trainer rank 0",
    "critic rank 0", "reference rank 0", "raylet of a second node", "only raylet",
)  # fmt: skip
STEPS = 5
"""That a run makes after a fault, before it counts as recovered."""
WAIT_S = 400.0


@dataclass(kw_only=True, slots=True)
class Cost:
    target: str
    signal: str
    noticed_s: float
    lost_s: float | None
    """None if the run ended."""
    failed: int
    """Groups that were dropped as failed, and are played again."""
    no_verdict: int
    outcome: str


@dataclass(slots=True)
class Run:
    """A run, what it prints with the time of each line, and its processes."""

    process: subprocess.Popen[str]
    folder: str
    lines: list[tuple[float, str]] = field(default_factory=list)
    added: threading.Condition = field(default_factory=threading.Condition)
    has_ended: bool = False

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.added:
                self.lines.append((time.monotonic(), line))
                self.added.notify_all()
        with self.added:
            self.has_ended = True
            self.added.notify_all()

    def steps(self, start: int = 0) -> list[tuple[float, int]]:
        """When each step was done, of the lines from number `start` on."""
        found = [(at_s, re.match(r"step (\d+)/", line)) for at_s, line in self.lines[start:]]
        return [(at_s, int(match[1])) for at_s, match in found if match]

    def wait_for_step(self, number: int, start: int = 0) -> float | None:
        """When this step was done; None if the run has ended before."""

        def done() -> float | None:
            return next((at_s for at_s, step in self.steps(start) if step >= number), None)

        with self.added:
            assert self.added.wait_for(lambda: done() or self.has_ended, WAIT_S), self.tail()
            return done()

    def tail(self) -> str:
        return "".join(line for _, line in self.lines[-20:])

    def actor(self, name: str) -> psutil.Process:
        """The actor of this name, which its companion is told."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_ours = any(word.startswith(self.folder) for word in words)
            if is_ours and name in words and any(word.endswith("companion.py") for word in words):
                return psutil.Process(int(words[words.index(name) - 3]))
        raise AssertionError(f"no {name} runs")

    def find(self, target: str) -> psutil.Process:
        if target == "vLLM core":
            children = self.actor("rollout engine 0").children()
            return next(each for each in children if re.search("EngineCore|spawn_main", " ".join(each.cmdline())))
        if target == "environment process":
            pools = self.actor("episode runner 0").children()
            supervisor = next(each for each in pools if "rlflow.processes.supervisor" in each.cmdline())
            return supervisor.children()[0]
        if "raylet" in target:
            parent = self.actor("rollout engine 0").parent()
            assert parent is not None and parent.name() == "raylet", parent
            return parent
        return self.actor(target)


@contextmanager
def running(*settings: str) -> Iterator[Run]:
    """A run, which is killed when the block ends."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        what = ["recipe=smoke", f"run.dir={folder}/run"]
        command = [sys.executable, "-m", "rlflow", "train", *what, *SETTINGS, *settings]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if any("cluster.address" in each for each in settings):
            nodes = stack.enter_context(RayNodes())
            nodes.add("rollout", "play", "training", cpus=4)
            command = [each.replace("ADDRESS", nodes.address) for each in command]
            process = nodes.on_head(command, **options)
        else:
            process = subprocess.Popen(command, text=True, start_new_session=True, **options)
        run = Run(process, folder)
        threading.Thread(target=run.read, daemon=True).start()
        try:
            yield run
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)


def hit(run: Run, target: str, number: signal.Signals) -> Cost:
    """Stop or kill one process of a run that goes on, and see what becomes of it."""
    before = run.steps()
    pace_s = statistics.median(b - a for (a, _), (b, _) in zip(before[-11:], before[-10:], strict=False))
    process = run.find(target)
    step_s, step = before[-1]
    start = len(run.lines)
    began_s = time.monotonic()
    handle = os.pidfd_open(process.pid)
    process.send_signal(number)
    gone, _, _ = select.select([handle], [], [], WAIT_S)
    os.close(handle)
    assert gone, f"the {target} is still there: {run.tail()}"
    gone_s = time.monotonic()
    with run.added:
        after = len(run.lines)
    goal = step + STEPS + len(run.steps(start))
    done_s = run.wait_for_step(goal, after)
    last = max((each for _, each in run.steps()), default=step)
    text = [line.strip() for _, line in run.lines[start:]]
    told = [line.removeprefix("ALARM: ") for line in text if line.startswith("ALARM: ")]
    return Cost(
        target=target,
        signal=number.name,
        noticed_s=round(gone_s - began_s, 1),
        lost_s=None if done_s is None else round(done_s - step_s - (goal - step) * pace_s, 1),
        failed=sum("dropped (failed)" in line for line in text),
        no_verdict=sum("dropped (no_verdict)" in line for line in text),
        outcome="; ".join(told)[:300] if done_s is not None else f"ended after step {last}: {text[-3:]}",
    )


def measure(targets: Sequence[str], settings: Sequence[str]) -> Iterator[Cost]:
    on_one = [target for target in targets if "raylet" not in target]
    if on_one:
        with running(*settings) as run:
            assert run.wait_for_step(8) is not None, run.tail()
            for target in on_one:
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    yield hit(run, target, number)
                    assert run.wait_for_step(run.steps()[-1][1] + 6) is not None, run.tail()
    pools = "+cluster.pools={rollout: {processes: [engine]}, play: {processes: [runner, reward]}, training: {}}"
    joined = ("cluster=ray", "cluster.address=ADDRESS", "weights.transport=p2p", pools)
    for target in targets:
        for number in (signal.SIGKILL, signal.SIGSTOP) if "raylet" in target else ():
            with running(*settings, *(joined if "second" in target else ())) as run:
                assert run.wait_for_step(8) is not None, run.tail()
                yield hit(run, target, number)


def false_alarms(count: int, settings: Sequence[str]) -> None:
    """Short runs, one after the other, on a machine with four more processes that compute."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for number in range(1, count + 1):
            began_s = time.monotonic()
            with running(*settings, "run.steps=5") as run:
                assert run.wait_for_step(5) is not None, run.tail()
            lines = [line for _, line in run.lines if "and was killed" in line]
            assert not lines, lines
            print(f"run {number} of {count}: 5 steps in {time.monotonic() - began_s:.0f} s, nothing killed", flush=True)
    finally:
        for each in busy:
            each.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--alarms", type=int, default=0, metavar="RUNS")
    parser.add_argument("--heartbeat", type=float, default=20.0, metavar="SECONDS")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no run outlives this process
    settings = [f"deadlines.heartbeat_s={arguments.heartbeat}"]
    if arguments.alarms:
        false_alarms(arguments.alarms, settings)
        return
    names = list(Cost.__annotations__)
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    costs = []
    for cost in measure(arguments.targets or TARGETS, settings):
        costs.append(cost)
        print("| " + " | ".join(str(value) for value in asdict(cost).values()) + " |", flush=True)
    print(json.dumps([asdict(each) for each in costs]))


if __name__ == "__main__":
    main()
