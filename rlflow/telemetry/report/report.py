"""report.html: one run on one page that needs nothing else, to keep and to send.

    metrics.jsonl, evaluations.jsonl, alarms.jsonl, samples/, about.json, config.yaml -> report.html

The curves are drawn by uPlot (uplot/, MIT licence), which the page carries whole, with its licence. The page fetches
nothing: its own policy (Content-Security-Policy) forbids every other script and every other address.
"""

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

import yaml

from rlflow.errors import RunError
from rlflow.groups.ledger import DropReason
from rlflow.runtime.disk import write_whole
from rlflow.telemetry import about, metrics, samples
from rlflow.telemetry.report.curves import MAX_POINTS, Records, column, data_of
from rlflow.telemetry.samples import ShownEpisode
from rlflow.telemetry.text import duration, number, printable, shorten

MAX_SAMPLED_STEPS = 24
MAX_MESSAGES = 12
"""Messages of one episode; of more, the first and the last are shown."""
MAX_MESSAGE_CHARACTERS = 4000
MAX_ALARMS = 200
"""Lines of alarms.jsonl; of more, the newest are shown."""
_UPLOT = ("uPlot.min.css", "uPlot.iife.min.js")
_FILES = resources.files("rlflow.telemetry.report")


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run, finished or not; returns its path.

    Raises RunError when the directory has no metrics, when one of its files is not what a run writes, or when the disk
    is full.
    """
    path = run_dir / "report.html"
    write_whole(path, render(run_dir, metrics.read(run_dir / "metrics.jsonl")), "the report")
    return path


def render(run_dir: Path, records: Records, *, is_watched: bool = False) -> str:
    """The page of these records, with what else `run_dir` holds. A watched page asks its own address for news."""
    config_text, config = _read_config(run_dir)
    evaluations, alarms = _read_lines(run_dir / "evaluations.jsonl"), _read_lines(run_dir / "alarms.jsonl")
    name = printable(str(_setting(config, "run", "name") or run_dir.resolve().name))
    data = {**data_of(records, evaluations), "alarms": _spans_of(alarms), "watched": is_watched}
    size = -(-len(records) // MAX_POINTS)
    more = [_all_numbers(records, evaluations), _starts(about.read(run_dir))]
    more += [_folded("config.yaml", "", _pre(config_text))] if config_text else []
    return page(
        name,
        data,
        head=_header(name, records, config) + _tiles(records, evaluations),
        alarms=_alarms(alarms),
        thinned=f"A point of a curve stands for up to {size} steps." if size > 1 else "",
        groups=_groups(records[-1]) if records else "",
        samples=_samples(run_dir),
        more="".join(more),
    )


def page(name: str, data: Mapping[str, Any], **parts: str) -> str:
    """A page with the charts of `data`, as report.js reads it; `parts` are HTML for the places of page.html."""
    template, style, script, licence, uplot_style, uplot = (
        (_FILES / file).read_text(encoding="utf-8")
        for file in ("page.html", "report.css", "report.js", *map("uplot/".__add__, ("LICENSE", *_UPLOT)))
    )
    code = f"/* {licence}*/\n{uplot}\n{script}"
    return Template(template).substitute(
        parts,
        name=html.escape(name),
        digest=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        style=f"{uplot_style}\n{style}",
        # "<" would let a string of the data end the script element.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        code=code,
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return metrics.read(path) if path.is_file() else []


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


# -- parts of a page; what they take is text, what they return is HTML


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def _pre(text: str) -> str:
    return f"<pre>{_text(text)}</pre>"


def _folded(summary: str, aside: str, content: str, *, is_open: bool = False) -> str:
    """A part that opens on a click; `content` is HTML."""
    opening = "<details open>" if is_open else "<details>"
    return f"{opening}<summary>{_text(summary)} <span>{_text(aside)}</span></summary><div>{content}</div></details>"


def _facts(facts: Mapping[str, object]) -> str:
    """Names and what they stand for; what is None or empty is left out."""
    kept = {name: value for name, value in facts.items() if value not in (None, "")}
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in kept.items())
    return f'<dl class="facts">{rows}</dl>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns after the first hold numbers."""
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title in heads)
    body = ""
    for name, *cells in rows:
        numbers = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{_text(name)}</th>{numbers}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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
    told = " &middot; ".join(f"{label} {_text(value)}" for label, value in named.items() if value is not None)
    return (
        f'<header><p class="eyebrow">rlflow run report</p><h1>{html.escape(name)}</h1>'
        f'<p><span class="status {kind}">{status}</span>{told}</p></header>'
    )


def _tiles(records: Records, evaluations: Records) -> str:
    if not records:
        return '<p class="nothing">No step has finished yet.</p>'
    rewards = column(records, "reward")
    first, last = _mean(rewards[:5]), _mean(rewards[-5:])
    change = "" if first is None or last is None else f"{last - first:+.3f} since the first"
    final = records[-1]
    seconds = sum(_present(column(records, "step_time")))
    dropped = sum(_present([_number(final, f"groups/dropped_{reason}") for reason in DropReason]))
    tiles = [
        ("Reward, first 5 steps", number(first), ""),
        ("Reward, last 5 steps", number(last), change),
        ("Time in steps", duration(seconds), f"{duration(seconds / len(records))} a step"),
        ("Tokens trained", number(_number(final, "num_tokens")), ""),
        ("Tokens a second", number(_mean(column(records, "throughput/tokens_per_s"))), "mean over the steps"),
        ("Groups trained", number(_number(final, "groups/trained")), f"{number(dropped)} dropped"),
    ]
    if held_out := [(value, row["step"]) for row in evaluations if (value := _number(row, "eval/reward")) is not None]:
        best, step = max(held_out)
        tiles.insert(2, ("Held-out reward", number(held_out[-1][0]), f"best {number(best)} after step {step}"))
    shown = (
        f'<div class="tile"><span>{_text(label)}</span><b>{_text(value)}</b><i>{_text(detail)}</i></div>'
        for label, value, detail in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


# -- alarms


def _spans_of(alarms: Records) -> list[dict[str, Any]]:
    """When each alarm lasted, for the time axes: from its first step to its end, or None while it lasts."""
    spans: list[dict[str, Any]] = []
    lasting: dict[str, dict[str, Any]] = {}
    for line in alarms:
        name, state = str(line.get("name")), line.get("state")
        if state == "ended" and name in lasting:
            lasting.pop(name)["until"] = line["step"]
        elif state == "began":
            lasting[name] = {"name": name, "since": line.get("since", line["step"]), "until": None}
            spans.append(lasting[name])
    return spans[-MAX_ALARMS:]


def _alarms(alarms: Records) -> str:
    told = [line for line in alarms if line.get("state") != "ended"][-MAX_ALARMS:]
    if not told:
        return ""
    items = "".join(
        f"<li><b>Step {_text(line['step'])}: {_text(line.get('what', line.get('name')))}</b>"
        f"<p>{_text(line.get('cause', ''))} {_text(line.get('remedy', ''))}</p></li>"
        for line in told
    )
    return f'<h2>Alarms</h2><section class="card"><ul class="alarms">{items}</ul></section>'


# -- tables and text


def _groups(final: Mapping[str, Any]) -> str:
    counts = {"trained": _number(final, "groups/trained")}
    for reason in DropReason:
        counts[f"dropped: {reason.replace('_', ' ')}"] = _number(final, f"groups/dropped_{reason}")
    admitted = _number(final, "groups/admitted") or 0.0
    shares = {label: 100 * (count or 0.0) / admitted if admitted else 0.0 for label, count in counts.items()}
    table = _table(
        ("ended as", "groups", "share"),
        ((label, number(count), f"{shares[label]:.1f}%") for label, count in counts.items()),
    )
    note = f"{number(admitted)} admitted since the start; those not counted here were under way after the last step"
    return f'<h2>Groups</h2><section class="card"><p class="note">{note}</p>{table}</section>'


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
    said = [
        (message["role"], shorten(printable(message["content"]), MAX_MESSAGE_CHARACTERS))
        for message in episode.messages
    ]
    parts = [f'<div class="message"><b>{_text(role)}</b>{_pre(text)}</div>' for role, text in said]
    if len(parts) > MAX_MESSAGES:
        cut = f'<p class="cut">{len(parts) - MAX_MESSAGES} messages cut</p>'
        parts = [*parts[: MAX_MESSAGES // 3], cut, *parts[len(parts) - (MAX_MESSAGES - MAX_MESSAGES // 3) :]]
    figures = {**episode.metrics, **episode.figures}
    facts = {
        "task": shorten(episode.task_id, 120),
        "ended": episode.end.value.replace("_", " "),
        "expected": shorten(episode.answer or "", MAX_MESSAGE_CHARACTERS),
        "advantage": " ".join(map(number, episode.advantages or [])),
        **{name.replace("_", " "): number(value) for name, value in figures.items()},
    }
    head = f"<h3>{label}: reward {number(episode.reward)}</h3>{_facts(facts)}"
    return f'<div class="episode {kind}">{head}{"".join(parts)}</div>'


def _all_numbers(records: Records, evaluations: Records) -> str:
    """A row for each metric that a step or an evaluation has; not all have every one."""
    rows: dict[str, tuple[str, ...]] = {}
    for lines in (records, evaluations):
        for name in dict.fromkeys(name for line in lines for name in line):
            present = _present(column(lines, name))
            if present and name not in rows and name != "step":
                rows[name] = (name, *map(number, (present[0], present[-1], min(present), max(present))))
    if not rows:
        return ""
    table = _table(("metric", "first", "last", "least", "greatest"), rows.values())
    return f"<h2>Everything else</h2>{_folded('All metrics', f'{len(rows)} names', table)}"


def _starts(starts: Sequence[Mapping[str, Any]]) -> str:
    """Who started the run, when and how: one part for each start, the newest first."""
    parts = []
    for start in reversed(starts):
        command, versions = start.get("command") or [], start.get("versions") or {}
        facts = {
            **start,
            "command": shlex.join(map(str, command)),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "machines": "; ".join(map(str, start.get("machines") or [])),
        }
        parts.append(_folded(f"Started {start.get('started')}", str(start.get("host") or ""), _facts(facts)))
    return "".join(parts)
