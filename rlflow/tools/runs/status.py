"""`rlflow status RUN`: what a run does now, and what each of its processes waits for."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.telemetry import metrics
from rlflow.telemetry.health import Alarm
from rlflow.telemetry.status import EVERY_S, Status, read_status
from rlflow.telemetry.text import duration, number, printable
from rlflow.tools.runs.read import HELD_OUT, REWARD, Run, read_run

SILENT_S = 6 * EVERY_S
"""A driver that has written nothing for so long is stuck, or its machine is gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace) -> int:
    found, status = read_run(options.run), read_status(options.run)
    now_s = time.time()
    if options.json:
        print(json.dumps(_facts(found, status, now_s)))
    else:
        print("\n".join(printable(line) for line in lines(found, status, now_s)))
    return 0


def lines(found: Run, status: Status | None, now_s: float) -> list[str]:
    """What is shown, with `now_s` in seconds since the epoch."""
    reward = next(reversed(found.curve(REWARD).values()), None)
    held_out = next(reversed(found.curve(HELD_OUT).items()), None)
    head = f"{found.folder}: {found.state}, step {found.step} of {found.of('run', 'steps')}, reward {number(reward)}"
    shown = [head + (f", held-out {number(held_out[1])} at step {held_out[0]}" if held_out else "")]
    shown += [f"failed: {found.reason.strip()}"] if found.reason else []
    shown += [f"alarm: {alarm}" for alarm in _alarms(found.folder)]
    if found.state != "running":
        return shown
    if status is None:
        return [*shown, "it has not said yet what it does"]
    silent_s = max(0.0, now_s - status.written_s)
    if silent_s > SILENT_S:
        shown.append(
            f"its driver has written nothing for {duration(silent_s)}, if the clocks of both machines agree: it is "
            "stuck, or its machine or disk is gone"
        )
    since = duration(status.written_s - status.phase_since_s)
    return [*shown, f"{status.phase}, for {since} ({duration(silent_s)} ago)", *status.doing]


def _alarms(folder: Path) -> list[Alarm]:
    """Those that are not over."""
    path = folder / "alarms.jsonl"
    newest = {line["name"]: Alarm(**line) for line in (metrics.read(path) if path.is_file() else [])}
    return [alarm for alarm in newest.values() if alarm.state != "ended"]


def _facts(found: Run, status: Status | None, now_s: float) -> dict[str, Any]:
    return {
        "run": str(found.folder),
        "state": found.state,
        "reason": found.reason,
        "step": found.step,
        "steps": found.of("run", "steps"),
        "alarms": [asdict(alarm) for alarm in _alarms(found.folder)],
        "silent_s": None if status is None else now_s - status.written_s,
        **({} if status is None else asdict(status)),
    }
