"""The numbers that the report draws, and which charts it has. Pure.

    records, evaluations -> one row a step -> buckets of neighbouring steps -> columns -> what report.js reads
                                                                   CHARTS -> charts --^

All charts share the same buckets, so that one pointer position means the same steps in each of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeAlias

from rlflow.telemetry.record import PHASES

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl, oldest first."""
Values: TypeAlias = list[float | None]
"""One value for each bucket; None when no step of the bucket has one."""

MAX_POINTS = 1000
"""Points of a curve, which is what the widest chart has pixels for."""
_MIN_FOR_OUTLIERS = 50
_NO_CURVE = ("step", "version")


@dataclass(kw_only=True, slots=True, frozen=True)
class Chart:
    section: str
    title: str
    metrics: Mapping[str, str]
    """Name in the record -> name in the legend."""
    note: str = ""
    is_wide: bool = False


def _one(section: str, metric: str, title: str, note: str = "") -> Chart:
    return Chart(section=section, title=title, metrics={metric: title}, note=note)


_REWARDS, _OTHERS = "Rewards", "All other metrics"
CHARTS = (
    Chart(
        section=_REWARDS,
        title="Reward",
        metrics={"reward": "training", "eval/reward": "held-out tasks"},
        note="mean over the episodes of a step; the band is one standard deviation to each side",
        is_wide=True,
    ),
    _one("Learning", "entropy", "Entropy", "nats a token"),
    _one("Learning", "completions/mean_length", "Completion length", "mean tokens after the prompt"),
    _one("Learning", "completions/clipped_ratio", "Completions cut off", "share that reached the length limit"),
    _one("Learning", "frac_reward_zero_std", "Groups without a signal", "share with equal rewards"),
    _one("Learning", "loss", "Loss"),
    _one("Learning", "grad_norm", "Gradient norm", "before clipping"),
    _one("Learning", "kl", "KL to the reference", "nats a token"),
    _one("Learning", "distil/kl", "KL to the teacher", "nats a token"),
    Chart(
        section="Freshness",
        title="Staleness",
        metrics={"staleness/mean": "mean", "staleness/max": "oldest token"},
        note="versions behind the update",
    ),
    _one("Freshness", "sampling/logp_difference_mean", "Engine against trainer", "mean |log-probability difference|"),
    _one("Speed", "throughput/tokens_per_s", "Throughput", "trained tokens a second"),
    Chart(
        section="Speed",
        title="Time by phase",
        metrics={f"time/{phase}": phase for phase in PHASES},
        note="seconds of a step; phases may overlap",
    ),
    Chart(
        section="Speed",
        title="Utilisation",
        metrics={"utilisation/rollout": "rollout", "utilisation/train": "training"},
        note="share of a step in which at least one was at work",
    ),
    _one("Speed", "queue/ready", "Ready groups", "waiting for the trainer"),
    _one("Speed", "throughput/mfu", "Use of the GPUs", "share of the trainer's peak while it works"),
)


def data_of(records: Records, evaluations: Records) -> dict[str, Any]:
    """What report.js reads: the steps of each bucket, a column for each recorded metric, and the charts in order."""
    rows: dict[int, dict[str, Any]] = {}
    for record in (*records, *evaluations):
        rows.setdefault(record["step"], {}).update(record)
    merged = [rows[step] for step in sorted(rows)]
    buckets = bucket_bounds(len(merged))
    names = dict.fromkeys(name for row in merged for name in row if name not in _NO_CURVE)
    columns = {name: column_of(name, merged, buckets) for name in names}
    columns = {name: column for name, column in columns.items() if any(value is not None for value in column["values"])}
    return {
        "first": [merged[start]["step"] for start, _ in buckets],
        "last": [merged[end - 1]["step"] for _, end in buckets],
        "columns": columns,
        "charts": [asdict(chart) for chart in charts_of(columns)],
    }


def charts_of(names: Iterable[str]) -> list[Chart]:
    """The charts that have something to show: the rewards first, and at the end one for each metric in no other."""
    names = list(names)
    parts = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    known = [*CHARTS[:1], *(_one(_REWARDS, name, name.split("/", 1)[1].removesuffix("/mean")) for name in parts)]
    charts = []
    for chart in (*known, *CHARTS[1:]):
        metrics = {name: label for name, label in chart.metrics.items() if name in names}
        if metrics:
            charts.append(replace(chart, metrics=metrics))
    drawn = {name for chart in charts for name in chart.metrics}
    drawn |= {spread for name in drawn if (spread := spread_of(name)) is not None}
    return charts + [_one(_OTHERS, name, name) for name in sorted(names) if name not in drawn]


def spread_of(name: str) -> str | None:
    """The metric that holds the standard deviation of this mean."""
    return "reward_std" if name == "reward" else f"{name.removesuffix('mean')}std" if name.endswith("/mean") else None


def bucket_bounds(count: int, max_points: int = MAX_POINTS) -> list[tuple[int, int]]:
    """(first row, row after the last) of at most `max_points` buckets of as equal a size as can be."""
    size = min(count, max_points)
    return list(pairwise(index * count // size for index in range(size + 1))) if size else []


def column_of(name: str, rows: Records, buckets: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Bucket means, the band around them, and the ends of the value axis.

    The band is one standard deviation to each side if that was recorded. Otherwise it spans the least and the greatest
    value of each bucket, if a bucket holds several steps.
    """
    held = _held(name, rows, buckets)
    means = [fmean(kept) if kept else None for kept in held]
    low: Values = []
    high: Values = []
    spread = spread_of(name)
    if spread is not None and any(spread in row for row in rows):
        widths = [fmean(kept) if kept else 0.0 for kept in _held(spread, rows, buckets)]
        low = [None if mean is None else mean - width for mean, width in zip(means, widths, strict=True)]
        high = [None if mean is None else mean + width for mean, width in zip(means, widths, strict=True)]
    elif any(end - start > 1 for start, end in buckets):
        low = [min(kept) if kept else None for kept in held]
        high = [max(kept) if kept else None for kept in held]
    return drawn(means, low, high)


def drawn(means: Values, low: Values, high: Values) -> dict[str, Any]:
    """A column as report.js reads it; without a band, `low` and `high` are empty."""
    ends = axis([*means, *low, *high])
    return {"values": _rounded(means), "low": _rounded(low), "high": _rounded(high), "range": ends}


def axis(values: Iterable[float | None]) -> tuple[float, float]:
    """Lower and upper end of the value axis; rare spikes far from the rest are cut off, but the pointer tells them."""
    present = sorted(value for value in values if value is not None)
    low, high = (present[0], present[-1]) if present else (0.0, 1.0)
    rare = len(present) * 2 // 100
    bottom, top = (present[rare], present[-1 - rare]) if len(present) >= _MIN_FOR_OUTLIERS else (low, high)
    if top > bottom:
        reach = 4 * (top - bottom)
        low, high = (bottom if low < bottom - reach else low), (top if high > top + reach else high)
    padding = 0.06 * (high - low) or max(abs(high) * 0.1, 1e-9 if high else 1.0)
    starts_at_zero = bool(present) and 0 <= present[0] < max(padding, high / 2)
    return (0.0 if starts_at_zero else low - padding), high + padding


def column(records: Records, name: str) -> Values:
    """The finite numbers of one metric, one for each record; None when a record has none."""
    values = (record.get(name) for record in records)
    return [float(value) if isinstance(value, int | float) and math.isfinite(value) else None for value in values]


def _held(name: str, rows: Records, buckets: Sequence[tuple[int, int]]) -> list[list[float]]:
    values = column(rows, name)
    return [[value for value in values[start:end] if value is not None] for start, end in buckets]


def _rounded(values: Values) -> Values:
    """Five digits, which is more than a screen shows."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
