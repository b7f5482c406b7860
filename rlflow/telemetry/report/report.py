"""report.html: one run on one page that needs nothing else, to keep and to send.

metrics.jsonl, samples/, config.yaml -> report.html

The curves are drawn by uPlot (uplot/, MIT licence), which the page carries whole, with its licence.
"""

import html
import json
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlflow.errors import RunError
from rlflow.groups.ledger import DropReason
from rlflow.runtime.disk import disk_errors
from rlflow.telemetry import metrics, samples
from rlflow.telemetry.report.curves import Chart, Records, column, hold_evaluations, make_buckets, sections
from rlflow.telemetry.samples import ShownEpisode
from rlflow.telemetry.text import duration, number, printable, shorten

MAX_SAMPLED_STEPS = 24
MAX_MESSAGES = 12
"""Messages of one episode; of more, the first and the last are shown."""
MAX_MESSAGE_CHARACTERS = 4000
_FILES = resources.files("rlflow.telemetry.report")
_HOW_TO_READ = (
    '<p class="note">Point at a chart to read all of them at that step. Drag across one to zoom; a double click shows '
    "the whole run again.</p><noscript><p>The curves need JavaScript; the numbers are below.</p></noscript>"
)


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run, finished or not; returns its path.

    Raises RunError when the directory has no metrics, when one of its files is not what a run writes, or when the disk
    is full.
    """
    records = metrics.read(run_dir / "metrics.jsonl")
    evaluations = run_dir / "evaluations.jsonl"
    if evaluations.is_file():
        hold_evaluations(records, metrics.read(evaluations))
    path = run_dir / "report.html"
    partial = run_dir / "report.html.partial"
    content = render(run_dir, records)
    with disk_errors("the report", run_dir):
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
    return path


def render(run_dir: Path, records: Records) -> str:
    """The page of these records, with the samples and the settings that `run_dir` holds."""
    config_text, config = _read_config(run_dir)
    buckets = make_buckets([record["step"] for record in records])
    curves = sections(records, buckets)
    name = printable(str(_setting(config, "run", "name") or run_dir.resolve().name))
    parts = [_header(name, records, config), _tiles(records)]
    if records:
        parts.append(_HOW_TO_READ)
        for title, charts in curves:
            parts.append(f'<h2>{title}</h2><div class="charts">{"".join(map(_card, charts))}</div>')
        parts.append(_groups(records[-1]))
    parts += [_samples(run_dir), _all_numbers(records)]
    if config_text:
        parts.append(_folded("config.yaml", "", f"<pre>{html.escape(printable(config_text))}</pre>"))
    data: dict[str, object] = {
        "steps": [(bucket.first_step + bucket.last_step) / 2 for bucket in buckets],
        "labels": [bucket.label for bucket in buckets],
        "charts": {chart.key: chart.data() for _, charts in curves for chart in charts if chart.has_values},
    }
    # "<" would let a string of the data end the script element.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style, script, licence, uplot_style, uplot = (
        (_FILES / file).read_text(encoding="utf-8")
        for file in ("report.css", "report.js", "uplot/LICENSE", "uplot/uPlot.min.css", "uplot/uPlot.iife.min.js")
    )
    code = f"/* {licence}*/\n{uplot}\n{script}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(name)} - rlflow</title><style>{uplot_style}\n{style}</style></head>\n"
        f'<body><main>{"".join(parts)}</main><div id="tip"></div>\n'
        f'<script type="application/json" id="data">{content}</script><script>{code}</script></body></html>\n'
    )


def _read_config(run_dir: Path) -> tuple[str, Mapping[str, Any]]:
    """The text of config.yaml and what it says; both empty when there is none."""
    path = run_dir / "config.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunError(f"{path} is not YAML ({error}); restore what the run wrote, or delete it") from error
    return text, config if isinstance(config, dict) else {}


def _setting(config: Mapping[str, Any], group: str, name: str) -> Any:
    section = config.get(group)
    return section.get(name) if isinstance(section, dict) else None


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    return fmean(present) if (present := _present(values)) else None


def _number(record: Mapping[str, Any], name: str) -> float | None:
    return column([record], name)[0]


def _tile(label: str, value: str, detail: str = "", kind: str = "") -> str:
    """One figure; `label`, `value` and `detail` are text."""
    under = f'<i class="{kind}">{html.escape(detail)}</i>' if detail else ""
    return f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>{under}</div>'


def _folded(summary: str, aside: str, content: str, *, is_open: bool = False) -> str:
    """A part that opens on a click; `summary` and `aside` are text, `content` is HTML."""
    more = f"<span>{html.escape(aside)}</span>" if aside else ""
    return (
        f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}{more}</summary>"
        f"<div>{content}</div></details>"
    )


# -- head


def _header(name: str, records: Records, config: Mapping[str, Any]) -> str:
    step, planned = (records[-1]["step"] if records else 0), _setting(config, "run", "steps")
    counted = f"{step} step" if step == 1 else f"{step} steps"
    if not isinstance(planned, int):
        status, kind = counted, ""
    elif step >= planned:
        status, kind = f"complete: {counted}", "done"
    else:
        status, kind = f"{step} of {planned} steps", "short"
    named = {"model": _setting(config, "model", "path"), "environment": _setting(config, "env", "name")}
    texts = {label: html.escape(printable(str(value))) for label, value in named.items() if value is not None}
    about = " &middot; ".join(f"{label} {text}" for label, text in texts.items())
    return (
        f'<header><p class="eyebrow">rlflow run report</p><h1>{html.escape(name)}</h1>'
        f'<p><span class="status {kind}">{status}</span>{about}</p></header>'
    )


def _tiles(records: Records) -> str:
    if not records:
        return '<p class="nothing">No step has finished yet.</p>'
    rewards = column(records, "reward")
    first, last = _mean(rewards[:5]), _mean(rewards[-5:])
    change = None if first is None or last is None else last - first
    detail, kind = ("", "") if change is None else (f"{change:+.3f} since the first", "up" if change >= 0 else "down")
    final = records[-1]
    seconds = sum(_present(column(records, "step_time")))
    dropped = sum(_present([_number(final, f"groups/dropped_{reason}") for reason in DropReason]))
    tiles = [
        _tile("Reward, first 5 steps", number(first)),
        _tile("Reward, last 5 steps", number(last), detail, kind),
        _tile("Time in steps", duration(seconds), f"{duration(seconds / len(records))} a step"),
        _tile("Tokens trained", number(_number(final, "num_tokens"))),
        _tile("Tokens a second", number(_mean(column(records, "throughput/tokens_per_s"))), "mean over the steps"),
        _tile("Groups trained", number(_number(final, "groups/trained")), f"{number(dropped)} dropped"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


# -- curves


def _card(chart: Chart) -> str:
    drawing, legend = '<p class="nothing">nothing was measured</p>', ""
    if chart.has_values:
        label = html.escape(f"{chart.title} by step")
        drawing = f'<div class="chart" role="img" aria-label="{label}" data-chart="{chart.key}"></div>'
        for rank, series in enumerate(chart.series):
            name = f'<span class="swatch s{rank + 1}"></span>{series.name} ' if len(chart.series) > 1 else ""
            legend += f"<span>{name}<b data-readout>{number(series.values[-1])}</b>{chart.unit}</span>"
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<section class="card{" wide" if chart.wide else ""}"><header><h3>{chart.title}</h3>'
        f'<div class="legend">{legend}</div></header>{note}{drawing}</section>'
    )


# -- tables and text


def _groups(final: Mapping[str, Any]) -> str:
    counts = {"trained": _number(final, "groups/trained")}
    for reason in DropReason:
        counts[f"dropped: {reason.replace('_', ' ')}"] = _number(final, f"groups/dropped_{reason}")
    admitted = _number(final, "groups/admitted") or 0.0
    rows = []
    for label, count in counts.items():
        share = (count or 0.0) / admitted if admitted else 0.0
        kind = "s1" if label == "trained" else "s2"
        bar = f'<div class="bar {kind}" style="width:{100 * share:.1f}%"></div>' if count else ""
        rows.append(
            f'<tr><td>{label}</td><td class="n">{number(count)}</td><td class="n">{100 * share:.1f}%</td>'
            f'<td class="bars">{bar}</td></tr>'
        )
    note = f"{number(admitted)} admitted since the start; those not counted here were under way after the last step"
    return f'<h2>Groups</h2><section class="card"><p class="note">{note}</p><table>{"".join(rows)}</table></section>'


def _samples(run_dir: Path) -> str:
    steps = samples.sampled_steps(run_dir)
    if not steps:
        return ""
    count = min(len(steps), MAX_SAMPLED_STEPS)
    # Evenly over the run; the first and the last are always among them.
    shown = [steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)]
    parts = []
    for step in reversed(shown):
        content = samples.read_samples(run_dir, step)
        rewards = f"best {number(content.best.reward)}, worst {number(content.worst.reward)}"
        pair = f'<div class="pair">{_episode("Best", "s3", content.best)}{_episode("Worst", "s2", content.worst)}</div>'
        parts.append(_folded(f"Step {step}", rewards, pair, is_open=step == shown[-1]))
    return f"<h2>Samples</h2>{''.join(parts)}"


def _episode(label: str, kind: str, episode: ShownEpisode) -> str:
    parts = [
        f'<div class="message"><b>{html.escape(printable(message["role"]))}</b>'
        f"<pre>{html.escape(shorten(printable(message['content']), MAX_MESSAGE_CHARACTERS))}</pre></div>"
        for message in episode.messages
    ]
    if len(parts) > MAX_MESSAGES:
        cut = f'<p class="cut">{len(parts) - MAX_MESSAGES} messages cut</p>'
        parts = [*parts[: MAX_MESSAGES // 3], cut, *parts[len(parts) - (MAX_MESSAGES - MAX_MESSAGES // 3) :]]
    about = f"{episode.end.value.replace('_', ' ')}, task {shorten(printable(episode.task_id), 120)}"
    head = f"<h3>{label}: reward {number(episode.reward)}</h3><p>{html.escape(about)}</p>"
    return f'<div class="episode {kind}">{head}{"".join(parts)}</div>'


def _all_numbers(records: Records) -> str:
    if not records:
        return ""
    titles = "".join(f'<th class="n">{title}</th>' for title in ("first", "last", "least", "greatest"))
    rows = []
    for name in records[-1]:
        values = column(records, name)
        present = _present(values)
        figures = (values[0], values[-1], min(present, default=None), max(present, default=None))
        cells = "".join(f'<td class="n">{number(value)}</td>' for value in figures)
        rows.append(f"<tr><td>{html.escape(printable(name))}</td>{cells}</tr>")
    table = f"<table><tr><th>metric</th>{titles}</tr>{''.join(rows)}</table>"
    return f"<h2>Everything else</h2>{_folded('All metrics', f'{len(records[-1])} names', table)}"
