"""A run in a world of its own that is started, watched and started again; its processes by what they do."""

from __future__ import annotations

import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from chaos_plan import POOLS, Scenario
from ray_nodes import Node, RayNodes

from rlflow.telemetry import metrics

LOOK_S = 0.05
NUM_TASKS, GROUPS_PER_STEP = 16, 2
CHECKPOINT_EVERY = 2
_TITLES = {
    "ray::EngineActor": "engine",
    "ray::RunnerActor": "runner",
    "ray::ScorerPool": "reward",
    "ray::FrozenWorker": "reference",
    "ray::RewardModelWorker": "reward_model",
    "VLLM::EngineCore": "vllm",
}
_WORKERS = {"rlflow.environments.host": "environment", "rlflow.rewards.score": "scoring"}
_CLOCK = """\
import mmap, os, struct, time
_file = os.open({path!r}, os.O_RDONLY)
_offset, _time, _time_ns = mmap.mmap(_file, 8, prot=mmap.PROT_READ), time.time, time.time_ns
time.time = lambda: _time() + struct.unpack("d", _offset[:8])[0]
time.time_ns = lambda: _time_ns() + int(struct.unpack("d", _offset[:8])[0] * 1e9)
"""
"""A module that Python imports when it starts: the clock of every Python process of the run is as wrong as a file says.
A time namespace would not do, because it leaves CLOCK_REALTIME alone."""
_LOSS = """\
import os
from rlflow.algorithms.loss.base import TokenLoss
from rlflow.algorithms.loss.ppo_clip import ppo_clip


def sometimes_nan(tokens, *, marker: str) -> TokenLoss:
    loss = ppo_clip(tokens)
    if not loss.loss.requires_grad:
        return loss
    try:
        os.unlink(marker)
    except FileNotFoundError:
        return loss
    return loss._replace(loss=loss.loss * float("nan"))
"""
"""A loss that is not a number once for each time that the file `marker` is made.

Groups without a gradient are only observed, and what is not a number there skips no update.
"""


class Ended(Exception):
    """The driver has ended."""


class ChaosRun:
    """One run directory and the processes that work on it. Use it as a context manager, within a world."""

    def __init__(
        self, scenario: Scenario, folder: Path, settings: tuple[str, ...] = (), toy: str | None = None
    ) -> None:
        """`folder` holds the run directory, which is a file system of its own, and what the run needs. With `toy` the
        run is that of toy_run.py, which makes this mistake."""
        self._program = ["-m", "rlflow", "train"] if toy is None else [str(Path(__file__).parent / "toy_run.py"), toy]
        self.scenario = scenario
        self.path = folder / "run"
        self.marker = folder / "nan"
        self.output: list[str] = []
        """Lines of all drivers so far."""
        self.nodes: RayNodes | None = None
        self.machines: list[tuple[str, Node]] = []
        """(pool, machine) of a cluster, without its head."""
        self._folder, self._more = folder, settings
        self._clock = folder / "clock"
        self._closing = ExitStack()
        self._driver: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    # -- the run

    def __enter__(self) -> ChaosRun:
        self.path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(self.path)], check=True)
        self._clock.write_bytes(bytes(8))
        (self._folder / "python").mkdir()
        (self._folder / "python" / "sitecustomize.py").write_text(_CLOCK.format(path=str(self._clock)))
        (self._folder / "loss.py").write_text(_LOSS)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self.stop_cluster()
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def command(self) -> list[str]:
        settings = [
            f"run.dir={self.path}", "run.steps=1000000", f"run.checkpoint_every={CHECKPOINT_EVERY}",
            "run.show_samples_every=1000000", f"env.args.size={NUM_TASKS}", "weights.verify=full",
            f"algorithm.groups_per_step={GROUPS_PER_STEP}", f"algorithm.loss={self._folder}/loss.py:sometimes_nan",
            f"algorithm.loss_args.marker={self.marker}", "deadlines.start_s=240", "deadlines.group_s=120",
            "deadlines.train_s=120", "deadlines.weights_s=120", "deadlines.checkpoint_s=120", *self.scenario.settings,
        ]  # fmt: skip
        if self.scenario.has_reward_model:
            settings += ["reward.function=null", f"reward.model={self._classifier()}"]
        if self.nodes is not None:
            settings += ["cluster=ray", f"cluster.address={self.nodes.address}"]
        return [sys.executable, *self._program, "recipe=smoke", *settings, *self._more]

    def start(self) -> None:
        """Start a driver, and before it the cluster if the run needs one and has none."""
        if self.scenario.num_nodes and self.nodes is None:
            self.nodes = self._closing.enter_context(RayNodes(with_networks=True))
            self.machines = list(zip(POOLS, self.nodes.add(*POOLS, cpus=1), strict=True))
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if self.nodes is None:
            environment = {**os.environ, "PYTHONPATH": str(self._folder / "python")}
            options |= {"text": True, "start_new_session": True, "env": environment}
            self._driver = subprocess.Popen(self.command(), **options)
        else:
            self._driver = self.nodes.on_head(self.command(), **options)
        self._reader = threading.Thread(target=self._read, args=(self._driver,), daemon=True)
        self._reader.start()

    def stop_cluster(self) -> None:
        self._closing.close()
        self.nodes, self.machines = None, []

    def replace_machine(self, pool: str, node: Node) -> None:
        """One that is gone, by one like it."""
        assert self.nodes is not None
        self.machines.remove((pool, node))
        self.machines += [(pool, node) for node in self.nodes.add(pool, cpus=1)]

    @property
    def driver(self) -> int:
        assert self._driver is not None
        return self._driver.pid

    @property
    def exit_code(self) -> int | None:
        assert self._driver is not None
        return self._driver.poll()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.driver, number)

    def close_output(self) -> None:
        """As when what read the run's output goes away."""
        assert self._driver is not None and self._driver.stdout is not None
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), self._driver.stdout.fileno())  # a thread reads from there, and finds the end

    def set_clock(self, seconds: float) -> None:
        """From now on every clock of the run is wrong by so much."""
        with open(self._clock, "r+b") as file:
            file.write(struct.pack("d", seconds))

    # -- how far it is

    def steps(self) -> int:
        """That have been reported; 0 before the first."""
        records = self._records()
        return records[-1]["step"] if records else 0

    def step_s(self) -> float:
        """Median of the last steps, seconds."""
        return statistics.median([record["step_time"] for record in self._records()[-20:]])

    def num_skipped(self) -> int:
        return sum(record["update_skipped"] for record in self._records())

    def killed_as_hung(self) -> list[str]:
        """What the run has written of the processes that it has killed because they hung."""
        path = self.path / "killed.log"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, condition: Callable[[], bool], deadline_s: float, look_s: float = LOOK_S) -> bool:
        """Whether the condition came within the deadline. Raises Ended when the driver has ended before."""
        end = time.monotonic() + deadline_s
        while not condition():
            if self.exit_code is not None:
                raise Ended
            if time.monotonic() > end:
                return False
            time.sleep(look_s)
        return True

    # -- its processes

    def census(self) -> Counter[str]:
        """How many of each kind there are, without those that are stopped."""
        return Counter(kind for kind, process in self.processes() if not _is_stopped(process))

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """In the order in which they were started."""
        return [process for each, process in self.processes() if each == kind]

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """(kind, process) of all in the world that belong to the run, "other" for those whose loss nobody plays."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):
                if process.pid not in (1, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((self._kind(process), process))
        return found

    def kill_all(self) -> None:
        """Everything that works on the run, except a cluster that is not its own."""
        own = set() if self.nodes is None else self._cluster_pids()
        for _, process in self.processes():
            if process.pid not in own:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._driver is not None:
            self._driver.wait(30)

    def wait_until_gone(self, deadline_s: float) -> list[str]:
        """What of the driver's own processes is there after the deadline. Those of a cluster do not count."""
        end = time.monotonic() + deadline_s
        while True:
            own = set() if self.nodes is None else self._cluster_pids()
            left = [f"{kind} {process.pid}" for kind, process in self.processes() if process.pid not in own]
            if not left or time.monotonic() > end:
                return left
            time.sleep(LOOK_S)

    def _kind(self, process: psutil.Process) -> str:
        if self._driver is not None and process.pid == self._driver.pid:
            return "driver"
        words, name = process.cmdline(), process.name()
        title = words[0].partition(".")[0] if words else ""
        if title == "ray::TrainerWorker":
            return "critic" if _is_critic(process) else "trainer"
        if title in _TITLES:
            return _TITLES[title]
        if words and words[-1].endswith("killed.log"):
            return "companion"
        parent = process.parent()
        above = parent.cmdline() if parent is not None else []
        if worker := next((kind for module, kind in _WORKERS.items() if module in words), None):
            return worker if above == words else "supervisor"
        # Now and then the title that vLLM gives its process does not take.
        if "spawn_main" in " ".join(words) and above and above[0].startswith("ray::EngineActor"):
            return "vllm"
        return {"gcs_server": "gcs", "raylet": "raylet"}.get(name, "other")

    def _cluster_pids(self) -> set[int]:
        assert self.nodes is not None
        nodes = [self.nodes.head, *(node for _, node in self.machines)]
        return {process.pid for node in nodes for process in node.processes()}

    def _read(self, driver: subprocess.Popen[str]) -> None:
        assert driver.stdout is not None
        with suppress(OSError, ValueError):  # closed by `close_output`
            for line in driver.stdout:
                self.output.append(line)

    def _records(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return metrics.read(path) if path.exists() else []

    def _classifier(self) -> Path:
        """A random reward model, made when it is first asked for, by a process that may load torch."""
        folder = self._folder / "classifier"
        if not folder.exists():
            code = "import sys, training; training.save_reward_model(training.Path(sys.argv[1]))"
            command = [sys.executable, "-c", code, str(folder)]
            subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent)
        return folder


def restarts(lines: list[str]) -> int:
    """How often a driver says that it went on from a checkpoint."""
    return sum(re.search(r"\(restart \d+, of", line) is not None for line in lines)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def _is_critic(rank: psutil.Process) -> bool:
    """Its companion is told its name."""
    commands = [child.cmdline() for child in rank.children()]
    return any(words[-1].endswith("killed.log") and words[-2].startswith("critic") for words in commands if words)
