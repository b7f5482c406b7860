"""Write docs/gallery.md: a curve and three figures of each recipe, from finished runs.

    .venv/bin/python scripts/gallery.py RUN ...

A run takes the place of an earlier one of its recipe; the others stay. docs/gallery/ holds the curves, and in runs.json
what the page says of each run: neither the machine's name nor its paths.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlflow.config import Config
from rlflow.errors import ConfigError, RunError, report_error
from rlflow.settings.recipe_files import recipe_names, recipe_summary, recipe_text
from rlflow.telemetry import about
from rlflow.telemetry.report.curves import bucket_bounds
from rlflow.telemetry.text import duration, number
from rlflow.tools.runs.read import HELD_OUT, LAST_STEPS, REWARD, Run, read_run

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT, LEFT, EDGE, MAX_POINTS = 260, 76, 34, 8, 120
COLOURS = {"reward": ("#2866d1", "#6b9ff5"), "held": ("#d9730d", "#ef9546"), "text": ("#595c62", "#aeb1b7")}
"""On a light page and on a dark one; those of the report."""
HEAD = f"""# Gallery

<!-- written by scripts/gallery.py -->

What each recipe did in a real run with one seed. The line is the mean reward of a step, the dots are held-out tasks
(`eval/reward`). The table has the reward's mean over the first {LAST_STEPS} steps and over the last {LAST_STEPS}, the
first and the last evaluation, and the time in steps.
"""


def entry(run: Run) -> dict[str, Any]:
    """What the page says of a run. Raises ConfigError for one that has not finished, or is of no recipe."""
    recipe = run.of("run", "name")
    if recipe not in recipe_names():
        raise ConfigError(f"{run.folder} is of {recipe}, which is no recipe; the gallery shows recipes")
    if run.state != "finished":
        raise ConfigError(
            f"{run.folder} is {run.state} after step {run.step}; the gallery shows runs that have finished"
        )
    rewards, held_out = list(run.curve(REWARD).values()), list(run.curve(HELD_OUT).values())
    starts = about.read(run.folder)
    start = starts[-1] if starts else {}
    seconds = sum(record["step_time"] for record in run.records)
    return {
        "recipe": recipe,
        "reward": f"{number(fmean(rewards[:LAST_STEPS]))} to {number(fmean(rewards[-LAST_STEPS:]))}",
        "held_out": f"{number(held_out[0])} to {number(held_out[-1])}" if held_out else "not measured",
        "time": f"{duration(seconds)} for {run.step} steps",
        "command": command(start.get("command") or []),
        "when": str(start.get("started", ""))[:10],
        "commit": str(start.get("commit") or "")[:12],
        "machines": [each.partition(": ")[2] for each in start.get("machines") or []],
    }


def command(words: Sequence[str]) -> str:
    """What was typed, as others would type it: without folders of the machine it ran on."""
    names = [Path(word).name for word in words]
    start = names.index("rlflow") + 1 if "rlflow" in names else len(words)
    kept = [word for word in words[start:] if not word.startswith("run.dir=") and "=/" not in word]
    return shlex.join(["rlflow", *kept]) if kept else ""


def svg(run: Run) -> str:
    """The curve, for light pages and dark ones."""
    reward, held_out = run.curve(REWARD), run.curve(HELD_OUT)
    steps = list(reward)
    points = [
        (fmean(steps[start:end]), fmean(reward[step] for step in steps[start:end]))
        for start, end in bucket_bounds(len(steps), MAX_POINTS)
    ]
    values = [*(value for _, value in points), *held_out.values()]
    low, high = min(values), max(values)
    first, last = min([*steps, *held_out]), max([*steps, *held_out])

    def place(step: float, value: float) -> tuple[str, str]:
        across = (step - first) / max(last - first, 1)
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{LEFT + across * (WIDTH - LEFT - EDGE):.1f}", f"{HEIGHT - EDGE - up * (HEIGHT - 2 * EDGE):.1f}"

    line = " ".join(",".join(place(*point)) for point in points)
    dots = "".join('<circle class="held" cx="{}" cy="{}" r="2.5"/>'.format(*place(*each)) for each in held_out.items())
    light, dark = ("".join(_style(name, colours[index]) for name, colours in COLOURS.items()) for index in (0, 1))
    told = f"Reward of {run.of('run', 'name')} over {run.step} steps, from {number(low)} to {number(high)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{told}"><title>{told}</title><style>text{{font:10px sans-serif;text-anchor:end}}'
        f"{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
        f'<text x="{LEFT - 5}" y="{EDGE + 4}">{number(high)}</text>'
        f'<text x="{LEFT - 5}" y="{HEIGHT - EDGE + 3}">{number(low)}</text>'
        f'<polyline class="reward" points="{line}"/>{dots}</svg>\n'
    )


def _style(name: str, colour: str) -> str:
    if name == "reward":
        return f".reward{{fill:none;stroke:{colour};stroke-width:1.8;stroke-linejoin:round}}"
    return f"{'text' if name == 'text' else f'.{name}'}{{fill:{colour}}}"


def model_of(recipe: str) -> str:
    """Its own, or that of the recipe that it begins with."""
    settings = yaml.safe_load(recipe_text(recipe))
    if path := (settings.get("model") or {}).get("path"):
        return path
    bases = [each for each in settings.get("defaults") or [] if isinstance(each, str)]
    return model_of(bases[0]) if bases else Config().model.path


def needs(recipe: str) -> str:
    """The hardware; a model of the hub is too large to learn on a CPU in minutes."""
    named = re.search(r"\d+ GPUs", recipe_summary(recipe))
    return named[0] if named else "one GPU" if "/" in model_of(recipe) else "a CPU"


def page(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of these recipes, by name; every other recipe is listed as not run."""
    rows = ["| Recipe | Curve | Reward | Held-out | Time |", "| --- | --- | --- | --- | --- |"]
    commands = ["## How they were run", ""]
    missing = ["## Not run yet", "", "| Recipe | Needs | Model | What it is |", "| --- | --- | --- | --- |"]
    for name in recipe_names():
        if (found := entries.get(name)) is None:
            missing.append(f"| `{name}` | {needs(name)} | `{model_of(name)}` | {recipe_summary(name)} |")
            continue
        rows.append(
            f"| `{name}` | ![reward of {name}](gallery/{name}.svg) | {found['reward']} | {found['held_out']} | "
            f"{found['time']} |"
        )
        facts = [found["when"], "; ".join(found["machines"]), f"commit {found['commit']}" if found["commit"] else ""]
        commands.append(f"- `{found['command']}` ({', '.join(fact for fact in facts if fact)})")
    parts = [[*rows, "", *commands] if entries else [], missing if len(entries) < len(recipe_names()) else []]
    return "\n".join([HEAD, *"\n\n".join("\n".join(part) for part in parts if part).splitlines(), ""])


def write(docs: Path, folders: Sequence[Path]) -> None:
    """Add the runs of these folders to the page in `docs`. Raises ConfigError or RunError before anything changes."""
    gallery = docs / "gallery"
    kept = gallery / "runs.json"
    entries: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.is_file() else {}
    runs = [read_run(folder) for folder in folders]
    found = {each["recipe"]: each for each in map(entry, runs)}
    gallery.mkdir(exist_ok=True)
    for run in runs:
        (gallery / f"{run.of('run', 'name')}.svg").write_text(svg(run))
    entries |= found
    kept.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    (docs / "gallery.md").write_text(page(entries))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/gallery.md from finished runs.")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories; none: write the page again")
    try:
        write(DOCS, parser.parse_args().runs)
    except (ConfigError, RunError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
