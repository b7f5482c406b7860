"""`rlflow runs [FOLDER]`: one line for each run below a folder, the newest last."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, RunError
from rlflow.telemetry.text import number, printable, shorten
from rlflow.tools.figures import table
from rlflow.tools.runs.read import HELD_OUT, REWARD, Run, read_run

_MAX_REASON = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="runs/ by default")
    parser.add_argument("--json", action="store_true", help="as one JSON list")


def run(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} here; give the one that holds your runs")
    # A sweep keeps its runs in a folder of its own.
    folders = [path.parent for pattern in ("", "*/", "*/*/") for path in folder.glob(f"{pattern}config.yaml")]
    found: list[Run] = []
    for each in folders:
        try:
            found.append(read_run(each))
        except (ConfigError, RunError) as error:
            print(f"rlflow: left out: {error}", file=sys.stderr)
    facts = [_facts(each) for each in sorted(found, key=lambda each: each.changed_s)]
    if options.json:
        print(json.dumps(facts))
    elif not facts:
        print(f"no run in {folder}")
    else:
        print(table(["run", "recipe", "model", "step", "reward", "eval best/last", "when", "state"], map(_row, facts)))
    return 0


def _facts(run: Run) -> dict[str, Any]:
    evaluations = run.curve(HELD_OUT).values()
    return {
        "run": str(run.folder),
        "recipe": run.of("run", "name"),
        "model": run.of("model", "path"),
        "step": run.step,
        "steps": run.of("run", "steps"),
        "reward": next(reversed(run.curve(REWARD).values()), None),
        "best_evaluation": max(evaluations, default=None),
        "last_evaluation": next(reversed(evaluations), None),
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s)),
        "state": run.state,
        "reason": run.reason,
    }


def _row(facts: dict[str, Any]) -> list[str]:
    best, last = facts["best_evaluation"], facts["last_evaluation"]
    reason = shorten(" ".join(facts["reason"].split()), _MAX_REASON)
    cells = (
        *(facts[name] for name in ("run", "recipe", "model")),
        f"{facts['step']}/{facts['steps']}",
        number(facts["reward"]),
        "-" if last is None else f"{number(best)}/{number(last)}",
        facts["when"],
        f"failed: {reason}" if reason else facts["state"],
    )
    return [printable(str(cell)) for cell in cells]
