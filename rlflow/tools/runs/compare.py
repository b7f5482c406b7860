"""`rlflow compare A B ...`: curves side by side, which settings differ, and whether the ends differ by more than noise.

Runs that differ in run.seed alone are one arm; its curve is their mean, with the least and the greatest of them.
"""

import argparse
import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from rlflow.errors import ConfigError
from rlflow.rundir.directory import flatten
from rlflow.telemetry.console import UNICODE_LEVELS
from rlflow.telemetry.report import report
from rlflow.telemetry.report.curves import MAX_POINTS, bucket_bounds, charts_of, drawn
from rlflow.telemetry.text import number, printable
from rlflow.tools.figures import table
from rlflow.tools.runs.read import HELD_OUT, LAST_STEPS, REWARD, Run, read_run

_NO_DIFFERENCE = ("run.name", "run.dir", "run.seed", "run.on_exists")
_ROWS, _CELLS = 10, 60
ALPHA = 0.05


@dataclass(kw_only=True, slots=True, frozen=True)
class Arm:
    """Runs with the same settings but for the seed."""

    name: str
    runs: list[Run]
    settings: dict[str, Any]
    """Dotted keys."""

    def band(self, steps: Sequence[int], metric: str, size: int) -> list[tuple[float, float, float] | None]:
        """Mean, least and greatest over the runs in each of at most `size` buckets of steps; None without a value."""
        curves = [each.curve(metric) for each in self.runs]
        buckets = [steps[start:end] for start, end in bucket_bounds(len(steps), size)]
        held = [[[curve[step] for step in bucket if step in curve] for curve in curves] for bucket in buckets]
        means = ([fmean(values) for values in bucket if values] for bucket in held)
        return [(fmean(values), min(values), max(values)) if values else None for values in means]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the runs' directories, two or more")
    parser.add_argument("--metric", metavar="NAME", help="as in metrics.jsonl; eval/reward if all have it, else reward")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also as a page, with the curves over each other")


def run(options: argparse.Namespace) -> int:
    folders = list(dict.fromkeys(options.runs))
    if len(folders) < 2:
        raise ConfigError(f"rlflow compare takes two runs or more; got {folders[0]}")
    found = [read_run(folder) for folder in folders]
    metric = options.metric or (HELD_OUT if all(each.curve(HELD_OUT) for each in found) else REWARD)
    for each in found:
        if not each.curve(metric):
            raise ConfigError(f"{each.folder} has no {metric}; its metrics.jsonl has the names that it has")
    arms = arms_of(found)
    told = compare(arms, metric)
    print("\n\n".join(told))
    if options.html is not None:
        try:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            options.html.write_text(page(arms, metric, told), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--html={options.html} cannot be written ({error.strerror}); give another file"
            ) from error
        print(f"\n{options.html}")
    return 0


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Arms A, B, ... in the order in which their first runs were given."""
    arms: list[Arm] = []
    for each in runs:
        settings = {
            key: value
            for key, value in flatten(each.settings).items()
            if key not in _NO_DIFFERENCE and not key.startswith("trackers.")
        }
        same = next((arm for arm in arms if arm.settings == settings), None)
        if same is None:
            arms.append(Arm(name=chr(ord("A") + len(arms)), runs=[each], settings=settings))
        else:
            same.runs.append(each)
    return arms


def compare(arms: Sequence[Arm], metric: str) -> list[str]:
    """What is printed, in paragraphs."""
    steps = sorted({step for arm in arms for each in arm.runs for step in each.curve(metric)})
    columns = [map(_cell, arm.band(steps, metric, _ROWS)) for arm in arms]
    labels = [_label(steps[start], steps[end - 1]) for start, end in bucket_bounds(len(steps), _ROWS)]
    rows = zip(labels, *columns, strict=True)
    fine = [arm.band(steps, metric, _CELLS) for arm in arms]
    values = [point[0] for line in fine for point in line if point]
    sparks = [f"{arm.name}  {_spark(line, min(values), max(values))}" for arm, line in zip(arms, fine, strict=True)]
    differing = sorted(
        {key for arm in arms for key in arm.settings if len({str(a.settings.get(key)) for a in arms}) > 1}
    )
    differences = [[f"  {key}", *(printable(str(arm.settings.get(key))) for arm in arms)] for key in differing]
    names = [arm.name for arm in arms]
    return [
        "\n".join(f"{arm.name}: {', '.join(_run(each) for each in arm.runs)}" for arm in arms),
        table([metric, *names], rows),
        "\n".join([*sparks, f"from {number(min(values))} to {number(max(values))}"]),
        table(["settings that differ", *names], differences) if differing else "no setting differs but the seed",
        *(["\n".join(verdict(arms[0], other, metric, len(arms) - 1) for other in arms[1:])] if len(arms) > 1 else []),
    ]


def page(arms: Sequence[Arm], metric: str, told: Sequence[str]) -> str:
    """What `compare` has told, as HTML: the verdict, then each metric with the curves of all arms, then the tables."""
    rows = [row for arm in arms for each in arm.runs for row in (*each.records, *each.evaluations)]
    steps = sorted({row["step"] for row in rows})
    columns, charts = dict[str, Any](), list[dict[str, Any]]()
    for chart in charts_of(sorted({name for row in rows for name in row} - {"step", "version"})):
        for name, label in chart.metrics.items():
            bands = {f"{arm.name} {name}": arm.band(steps, name, MAX_POINTS) for arm in arms}
            for key, band in bands.items():
                mean, low, high = ([point and point[index] for point in band] for index in range(3))
                columns[key] = drawn(mean, low, high) if low != high else drawn(mean, [], [])
            title = chart.title if len(chart.metrics) == 1 else f"{chart.title}: {label}"
            note = "mean over the seeds; the band is all of them" if chart.is_wide else chart.note
            shown = {key: key.partition(" ")[0] for key, band in bands.items() if any(band)}
            charts += [asdict(replace(chart, title=title, note=note, metrics=shown))] if shown else []
    members, figures, _, settings, *verdicts = map(html.escape, told)
    lines = "".join(f"<p>{line}</p>" for part in (*verdicts, members) for line in part.splitlines())
    title = f"{metric} of {' and '.join(arm.name for arm in arms)}"
    ends = zip(*((steps[start], steps[end - 1]) for start, end in bucket_bounds(len(steps), MAX_POINTS)), strict=True)
    return report.page(
        title,
        dict(zip(("first", "last"), ends, strict=True), columns=columns, charts=charts, alarms=[], watched=False),
        head=f'<header><p class="eyebrow">rlflow compare</p><h1>{html.escape(title)}</h1>{lines}</header>',
        groups=f"<h2>{html.escape(metric)}</h2><pre>{figures}</pre><h2>Settings</h2><pre>{settings}</pre>",
        **dict.fromkeys(("alarms", "thinned", "samples", "more"), ""),
    )


def verdict(first: Arm, other: Arm, metric: str, num_tests: int = 1) -> str:
    """Whether the final values of two arms differ by more than their seeds do (Welch's t-test, two-sided).

    `num_tests` such comparisons are made, so that the bound for each is ALPHA / num_tests (Bonferroni).
    """
    a, b = ([value for each in arm.runs if (value := each.final(metric)) is not None] for arm in (first, other))
    ends = "the last evaluation" if metric.startswith("eval/") else f"the mean of the last {LAST_STEPS} steps"
    said = f"{other.name} - {first.name}: {fmean(b) - fmean(a):+.3f} ({number(fmean(b))} - {number(fmean(a))}; {ends})"
    if min(len(a), len(b)) < 2:
        spreads = [list(arm.runs[0].curve(metric).values())[-LAST_STEPS:] for arm in (first, other)]
        within = " and ".join(f"{stdev(each):.3f}" if len(each) > 1 else "unknown" for each in spreads)
        return (
            f"{said}: with one seed this cannot be told from noise; each varies by {within} "
            f"(standard deviation of its last {LAST_STEPS} points). Train more seeds: --multirun run.seed=0,1,2"
        )
    p = welch(a, b)
    told = "more than noise" if p < ALPHA / num_tests else "not more than noise"
    return (
        f"{said}: {told} (Welch's t-test over {len(a)} and {len(b)} seeds, p = {p:.2g}, bound {ALPHA / num_tests:.2g})"
    )


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value of Welch's t-test; each sample has two values or more."""
    shares = variance(a) / len(a), variance(b) / len(b)
    difference = abs(fmean(a) - fmean(b))
    if sum(shares) == 0:
        return float(difference == 0)
    t = difference / math.sqrt(sum(shares))
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / (len(a) - 1) + shares[1] ** 2 / (len(b) - 1))
    # With t = sqrt(freedom) tan(angle), Student's density is proportional to cos(angle)^(freedom - 1).
    angle, parts = math.atan(t / math.sqrt(freedom)), 2000
    heights = [math.cos(angle * index / parts) ** (freedom - 1) for index in range(parts + 1)]
    area = angle / parts / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - 2 * scale * area)


def _label(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _cell(point: tuple[float, float, float] | None) -> str:
    if point is None:
        return "-"
    mean, low, high = map(number, point)
    return mean if low == high else f"{mean} ({low} to {high})"


def _spark(line: Sequence[tuple[float, float, float] | None], low: float, high: float) -> str:
    scale = (len(UNICODE_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(UNICODE_LEVELS[round((point[0] - low) * scale)] if point else " " for point in line)


def _run(run: Run) -> str:
    return f"{run.folder} (seed {run.of('run', 'seed')}, {run.state}, step {run.step})"
