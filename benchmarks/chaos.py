"""Faults on every process of real runs, from a seed: a table of what became of them, and whether anything was lost.

    python benchmarks/chaos.py --seed 1                 # 100 kills and 63 other faults, in three runs
    python benchmarks/chaos.py --seed 1 --faults 30     # of as many kinds as that allows
    python benchmarks/chaos.py --seed 1 --minutes 6     # in parts: go on with --only and what was not played
    python benchmarks/chaos.py --seed 1 --only 17       # fault 17 alone, as a reproduction

Each run is in a world of its own (tests/support/world.py): a clean end is one after which nothing is there that was not
there before. The plan is in tests/support/chaos_plan.py. The last line is a JSON object; the exit code is 1 if any
promise was broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from chaos_plan import SCENARIOS, Fault, plan, shortened  # pyright: ignore[reportMissingImports]
from chaos_play import Play, Played, Row  # pyright: ignore[reportMissingImports]
from world import MARK, SCRATCH, in_world  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]


def chosen(options: argparse.Namespace) -> list[Fault]:
    faults = plan(options.seed, [SCENARIOS[name] for name in options.scenario])
    if options.only:
        return [fault for fault in faults if fault.number in options.only]
    return shortened(faults, options.faults) if options.faults else faults


def table(rows: list[Row]) -> str:
    """Markdown: target -> count -> outcome -> seconds lost -> left behind -> broken."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.scenario, row.name].append(row)
    lines = [
        "| run | fault | count | outcome | seconds lost, median (most) | left behind | broken |",
        "|---|---|---|---|---|---|---|",
    ]
    for (scenario, name), found in sorted(groups.items()):
        outcomes = ", ".join(f"{outcome} x{n}" for outcome, n in Counter(row.outcome for row in found).most_common())
        lost = [row.seconds_lost for row in found if row.seconds_lost is not None]
        seconds = f"{statistics.median(lost):.1f} ({max(lost):.1f})" if lost else "-"
        left, broken = sum(len(row.left) for row in found), sum(len(row.broken) for row in found)
        lines.append(f"| {scenario} | {name} | {len(found)} | {outcomes} | {seconds} | {left} | {broken} |")
    return "\n".join(lines)


def play_all(faults: list[Fault], options: argparse.Namespace) -> list[Played]:
    """Every scenario that has faults, in a world of its own."""
    played = []
    for scenario in SCENARIOS.values():
        if numbers := [fault.number for fault in faults if fault.scenario == scenario.name]:
            words = ["--seed", str(faults[0].seed), "--only", *map(str, numbers), "--minutes"]
            words += [str(options.minutes), "--settings", *options.settings]
            words += ["--toy", options.toy] if options.toy else []
            command = in_world([sys.executable, str(Path(__file__).resolve()), *words], ROOT)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 0, f"{scenario.name} could not be played to its end"
            content = json.loads(done.stdout.splitlines()[-1])
            played.append(Played(**{**content, "rows": [Row(**row) for row in content["rows"]]}))
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--faults", type=int, help="play so many of them, of as many kinds as possible")
    parser.add_argument("--only", type=int, nargs="+", metavar="K", help="play the faults with these numbers")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault of a run later than that")
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="more settings of the runs")
    parser.add_argument("--toy", metavar="MISTAKE", help="with tests/support/toy_run.py in place of rlflow")
    options = parser.parse_args()
    faults = chosen(options)
    if MARK in os.environ:
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
            scenario = SCENARIOS[faults[0].scenario]
            play = Play(scenario, faults, Path(folder), tuple(options.settings), options.toy, 60 * options.minutes)
            print(json.dumps(play.play().as_json()))
        return 0
    played = play_all(faults, options)
    rows = [row for each in played for row in each.rows]
    print(table(rows))
    broken = [f"{each.scenario}: {one}" for each in played for one in each.broken]
    broken += [f"fault {row.number} ({row.name}): {one}" for row in rows for one in row.broken]
    left = [f"fault {row.number} ({row.name}): {one}" for row in rows for one in row.left]
    print("\n".join(["", *broken, *left]))
    total = {
        "seed": options.seed,
        "kills": sum(row.name.startswith("kill ") for row in rows),
        "other_faults": sum(not row.name.startswith("kill ") for row in rows),
        "not_played": [fault.number for fault in faults if fault.number not in {row.number for row in rows}],
        "steps": sum(each.steps for each in played),
        "tasks_given_up": sum(each.given_up for each in played),
        "broken": broken,
        "left_behind": left,
    }
    print(json.dumps(total))
    return int(bool(broken or left))


if __name__ == "__main__":
    sys.exit(main())
