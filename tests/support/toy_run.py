"""A stand-in for `rlflow train` without models: ledger, metrics, checkpoints, and children named like those of a run.

`toy_run.py MISTAKE run.dir=... other settings`; with the mistake "none" it keeps every promise. It shows in seconds
that chaos finds what a real run would do wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from chaos_run import CHECKPOINT_EVERY, GROUPS_PER_STEP, NUM_TASKS

from rlflow.errors import ConfigError, RunError
from rlflow.groups.ledger import GroupState, Ledger
from rlflow.rundir.lock import hold
from rlflow.runtime.disk import disk_errors
from rlflow.telemetry import metrics

CHILDREN = ("gcs_server", "raylet", "ray::EngineActor", "ray::RunnerActor")
VITAL = 2
"""The first two: the run does not outlive them."""
LIFE = (GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TRAINING, GroupState.TRAINED)
STEP_S = 0.05
HUNG_AFTER_S = 5.0


class Toy:
    def __init__(self, run: Path, mistake: str, marker: Path) -> None:
        self.run, self.mistake, self.marker = run, mistake, marker
        self.stop: int | None = None
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.hung_since: dict[str, float] = {}
        self.step, self.version = self.resume()
        self.ledger = Ledger(run / "ledger.db")

    def resume(self) -> tuple[int, int]:
        """(step, version) of the newest checkpoint that is whole."""
        for left in self.run.glob("ledger.db*"):
            left.unlink()
        folders = (self.run / "checkpoints").glob("step_*[0-9]")
        for folder in sorted(folders, key=lambda each: -int(each.name[5:])):
            try:
                state = json.loads((folder / "state.json").read_text())
                assert (folder / "ledger.db").stat().st_size == state["size"]
                assert sum((folder / "ledger.db").read_bytes()) == state["sum"]
            except (OSError, ValueError, AssertionError, KeyError):
                print(f"ALARM: {folder} is damaged", flush=True)
                continue
            shutil.copyfile(folder / "ledger.db", self.run / "ledger.db")
            metrics.truncate_after(self.run / "metrics.jsonl", state["step"])
            return state["step"], state["version"]
        (self.run / "metrics.jsonl").unlink(missing_ok=True)
        return 0, 0

    async def train(self) -> None:
        while self.stop is None:
            await asyncio.sleep(STEP_S)
            self.tend()
            await self.one_step()
            if self.step % CHECKPOINT_EVERY == 0:
                await self.save()
        await self.save()

    async def one_step(self) -> None:
        first = self.step * GROUPS_PER_STEP
        for number in range(first, first + GROUPS_PER_STEP):
            task = 0 if self.mistake == "twice" and number == 3 else number % NUM_TASKS
            group = self.ledger.admit(f"t{task}", task_pass=number // NUM_TASKS, version=self.version)
            for state in LIFE:
                self.ledger.advance(group, state, version=self.version)
        await self.ledger.flush()
        skipped = self.marker.exists()
        self.marker.unlink(missing_ok=True)
        self.step += 1
        self.version += not skipped
        record = {"step": self.step, "version": self.version, "update_skipped": int(skipped), "step_time": STEP_S}
        with disk_errors("metrics", self.run), open(self.run / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**record, "staleness/max": 0}) + "\n")
        with suppress(BrokenPipeError):
            print(f"step {self.step}/1000000", flush=True)

    async def save(self) -> None:
        folder = self.run / "checkpoints" / f"step_{self.step}"
        partial = folder.with_suffix(".partial")
        with disk_errors("a checkpoint", self.run):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            content = await self.ledger.copy()
            (partial / "ledger.db").write_bytes(content)
            await asyncio.sleep(STEP_S)
            state = {"step": self.step, "version": self.version, "size": len(content), "sum": sum(content)}
            (partial / "state.json").write_text(json.dumps(state))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        for old in sorted((self.run / "checkpoints").glob("step_*[0-9]"), key=lambda each: int(each.name[5:]))[:-2]:
            shutil.rmtree(old)

    def tend(self) -> None:
        """Start children that are missing, and end those that hang."""
        for index, name in enumerate(CHILDREN):
            child = self.children.get(name)
            if child is not None and child.poll() is not None and index < VITAL:
                raise RunError(f"{name} died")
            if child is None or child.poll() is not None:
                if child is not None and self.mistake == "leaves":
                    Path(f"/tmp/toy-{child.pid}").touch()
                program = self.run.parent / name  # what a process is called is the name of its file
                program.unlink(missing_ok=True)
                program.symlink_to("/bin/sleep")
                self.children[name] = subprocess.Popen([name, "1000000"], executable=program, preexec_fn=_follow)
            elif _state(child.pid) == "T":
                if time.monotonic() - self.hung_since.setdefault(name, time.monotonic()) > HUNG_AFTER_S:
                    child.kill()
            else:
                self.hung_since.pop(name, None)


def _follow() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def main(mistake: str, settings: list[str]) -> int:
    named = dict(each.split("=", 1) for each in settings if "=" in each)
    run, marker = Path(named["run.dir"]), Path(named["algorithm.loss_args.marker"])
    try:
        with hold(run):
            toy = Toy(run, mistake, marker)

            def handle(number: int, _: object) -> None:
                if number == signal.SIGINT and toy.stop is not None:
                    os._exit(128 + number)
                toy.stop = number

            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(each, handle)
            asyncio.run(toy.train())
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            toy.ledger.close()
            for child in toy.children.values():
                child.kill()
                child.wait()
            assert toy.stop is not None
            sys.stdout = None  # what is left to print may have no reader
            return 128 + toy.stop
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, OSError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
