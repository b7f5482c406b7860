"""What grows in a long run: slopes per 1,000 steps of memory, descriptors, threads and files, by least squares.

    python benchmarks/long_run.py --steps 2000 [key=value ...]

One run of recipe=smoke in a world of its own (tests/support/world.py). Every few seconds each of its processes is
looked at; what happens in the first fifth of the steps is not counted. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from world import MARK, SCRATCH, SHARED_MEMORY, TEMPORARY, in_world  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 0.2
"""Share of the steps that do not count: caches and pools fill."""
MB = 1e6
Series = dict[tuple[str, str], list[tuple[int, float]]]
"""(process or folder, quantity) -> (steps done, value) of each look."""


def slope_per_1000(points: list[tuple[int, float]]) -> float:
    """The slope of the line through the points (steps done, value) with the least squares."""
    steps, values = np.array(points, dtype=float).T
    return float(np.polyfit(steps / 1000, values, 1)[0])


def _name(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    words = process.cmdline()
    if "rlflow.processes.supervisor" in words:
        return f"{words[-2].rpartition('.')[2]} under {(process.parent() or process).name()}"
    return words[0].partition(".")[0] if words and words[0].startswith(("ray::", "VLLM::")) else process.name()


def look(driver: int, run: Path, steps: int, series: Series) -> None:
    """Add one look at every process of the run, and at the folders where it leaves files."""
    first = psutil.Process(driver)
    for process in [first, *first.children(recursive=True)]:
        try:
            memory, name = _memory(process.pid), f"{_name(process, driver)} {process.pid}"
            values = {
                "own MB": memory["Anonymous"] / 1000,
                "PSS MB": memory["Pss"] / 1000,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
        except (psutil.Error, OSError):
            continue  # it ended meanwhile
        for quantity, value in values.items():
            series[name, quantity].append((steps, value))
    for folder in (run, TEMPORARY, SHARED_MEMORY):
        sizes = _sizes(folder)
        label = "run.dir" if folder == run else str(folder)
        series[label, "files"].append((steps, len(sizes)))
        series[label, "files MB"].append((steps, sum(sizes) / MB))


def _memory(pid: int) -> dict[str, int]:
    """Kind of memory -> kB. Anonymous is what the process has written itself. Pages of libraries are not in it: whether
    they are private depends on who else on the machine has loaded the same file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


def _sizes(folder: Path) -> list[int]:
    """Bytes of every file below the folder and on its file system."""
    found, device = [], folder.stat().st_dev
    for _, folders, names, at in os.fwalk(folder):
        folders[:] = [each for each in folders if os.stat(each, dir_fd=at).st_dev == device]
        for name in names:
            with suppress(FileNotFoundError):  # just removed
                found.append(os.stat(name, dir_fd=at, follow_symlinks=False).st_size)
    return found


def watch(steps: int, every_s: float, settings: list[str], run: Path) -> tuple[Series, int, float]:
    """Looks, steps done and seconds of a whole run. Raises AssertionError when it fails."""
    series: Series = defaultdict(list)
    command = [sys.executable, "-m", "rlflow", "train", "recipe=smoke", f"run.dir={run}", f"run.steps={steps}"]
    command += ["run.show_samples_every=1000", "run.checkpoint_every=50", *settings]
    metrics, began_s, done = run / "metrics.jsonl", time.monotonic(), 0
    with open(run.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(every_s)
                break
            except subprocess.TimeoutExpired:
                done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                if done:
                    look(process.pid, run, done, series)
                    print(f"{done} steps, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    assert code == 0, f"the run ended with {code}: {run.with_suffix('.log').read_text()[-3000:]}"
    return series, done, time.monotonic() - began_s


def slopes(series: Series, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Process or folder -> quantity -> first, last, and slope per 1,000 steps, after the warm-up. Processes that were
    seen fewer than five times after it are left out."""
    table: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (name, quantity), points in sorted(series.items()):
        counted = [point for point in points if point[0] >= WARM_UP * steps]
        if len(counted) >= 5:
            first, last, slope = counted[0][1], counted[-1][1], slope_per_1000(counted)
            table[name][quantity] = {"first": round(first, 2), "last": round(last, 2), "per_1000": round(slope, 3)}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--series", type=Path, help="a file for all that was seen, as JSON")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if MARK not in os.environ:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        return subprocess.run(in_world(command, ROOT), check=False).returncode
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        series, done, seconds = watch(options.steps, options.every, options.settings, Path(folder) / "run")
    if options.series is not None:
        options.series.write_text(json.dumps({f"{name}: {what}": points for (name, what), points in series.items()}))
    table = slopes(series, done)
    print(f"{'':32} {'':12} {'first':>10} {'last':>10} {'per 1,000 steps':>16}")
    for name, quantities in table.items():
        for quantity, found in quantities.items():
            print(f"{name:32} {quantity:12} {found['first']:10} {found['last']:10} {found['per_1000']:16}")
    print(json.dumps({"steps": done, "seconds": round(seconds), "slopes": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
