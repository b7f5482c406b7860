"""Which curves the report shows, and the data from which uPlot draws them. Pure.

    records -> buckets of neighbouring steps -> Chart (series of bucket means) -> what report.js reads

All charts of a page share the same buckets, so that one pointer position means the same steps in each of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeAlias

from rlflow.telemetry.record import PHASES
from rlflow.telemetry.text import number

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl, oldest first."""
Values: TypeAlias = list[float | None]
"""One value for each bucket; None when no step of the bucket has one."""

MAX_BUCKETS = 320
_MIN_FOR_OUTLIERS = 50


@dataclass(kw_only=True, slots=True, frozen=True)
class Bucket:
    """Neighbouring steps that are drawn as one point."""

    first: int
    """Index of its first record."""
    end: int
    """Index after its last record."""
    first_step: int
    last_step: int

    @property
    def label(self) -> str:
        if self.first_step == self.last_step:
            return f"step {self.first_step}"
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(kw_only=True, slots=True)
class Series:
    name: str
    values: Values
    low: Values = field(default_factory=list)
    """Lower edge of the band around the line; empty for no band."""
    high: Values = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Chart:
    key: str
    title: str
    series: list[Series]
    note: str = ""
    wide: bool = False
    stacked: bool = False
    from_zero: bool = False
    top: float | None = None
    """Fixed upper end of the axis."""
    unit: str = ""

    @property
    def has_values(self) -> bool:
        return any(value is not None for series in self.series for value in series.values)

    @property
    def lines(self) -> list[Values]:
        """What is drawn of each series: its values, or the upper edges of the series when they are stacked."""
        if not self.stacked:
            return [one.values for one in self.series]
        edges: list[Values] = []
        below = [0.0] * len(self.series[0].values)
        for one in self.series:
            below = [under + (value or 0.0) for under, value in zip(below, one.values, strict=True)]
            edges.append(list(below))
        return edges

    def data(self) -> dict[str, object]:
        """What report.js needs: the lines and their bands, the axis, and the series' names and texts."""
        bands = [(one.low, one.high) if one.low and not self.stacked else (None, None) for one in self.series]
        return {
            "lines": [_rounded(line) for line in self.lines],
            "bands": [[edge and _rounded(edge) for edge in band] for band in bands],
            "range": axis(self),
            "stacked": self.stacked,
            "unit": self.unit,
            "names": [one.name for one in self.series],
            "texts": [[number(value) for value in one.values] for one in self.series],
        }


def _rounded(values: Values) -> Values:
    """Six digits, which is more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def make_buckets(steps: Sequence[int], max_buckets: int = MAX_BUCKETS) -> list[Bucket]:
    """At most `max_buckets` buckets of as equal a size as can be."""
    count = min(len(steps), max_buckets)
    bounds = [index * len(steps) // count for index in range(count + 1)] if count else [0]
    return [
        Bucket(first=first, end=end, first_step=steps[first], last_step=steps[end - 1])
        for first, end in pairwise(bounds)
    ]


def make_series(name: str, values: Sequence[float | None], buckets: Sequence[Bucket]) -> Series:
    """Bucket means; when a bucket holds several steps, the band spans the least and the greatest of them."""
    held = [[value for value in values[bucket.first : bucket.end] if value is not None] for bucket in buckets]
    series = Series(name=name, values=[fmean(kept) if kept else None for kept in held])
    if any(bucket.end - bucket.first > 1 for bucket in buckets):
        series.low = [min(kept) if kept else None for kept in held]
        series.high = [max(kept) if kept else None for kept in held]
    return series


def axis(chart: Chart) -> tuple[float, float]:
    """Lower and upper end of the value axis; rare spikes far from the rest are cut off, but the pointer tells them."""
    bands = [] if chart.stacked else [edge for one in chart.series for edge in (one.low, one.high)]
    values = sorted(value for line in [*chart.lines, *bands] for value in line if value is not None)
    low, high = (values[0], values[-1]) if values else (0.0, 1.0)
    rare = len(values) * 2 // 100
    bottom, top = (values[rare], values[-1 - rare]) if len(values) >= _MIN_FOR_OUTLIERS else (low, high)
    if top > bottom:
        reach = 4 * (top - bottom)
        low, high = (bottom if low < bottom - reach else low), (top if high > top + reach else high)
    padding = 0.06 * (high - low) or max(abs(high) * 0.1, 1e-9 if high else 1.0)
    low, high = low - padding, high + padding
    if chart.from_zero or (values and values[0] >= 0 > low):
        low = 0.0
    return low, high if chart.top is None else chart.top


def column(records: Records, name: str) -> list[float | None]:
    """The finite numbers of one metric, one for each record; None when a record has none."""
    values = (record.get(name) for record in records)
    return [float(value) if isinstance(value, int | float) and math.isfinite(value) else None for value in values]


def hold_evaluations(records: Sequence[dict[str, Any]], evaluations: Records) -> None:
    """Give each record the evaluation reward that was the latest when its step began."""
    held: float | None = None
    remaining = list(evaluations)
    for record in records:
        while remaining and remaining[0]["step"] < record["step"]:
            held = remaining.pop(0)["eval/reward"]
        record["eval/reward"] = held
    if records and remaining:
        records[-1]["eval/reward"] = remaining[-1]["eval/reward"]


def sections(records: Records, buckets: Sequence[Bucket]) -> list[tuple[str, list[Chart]]]:
    """Headings, each with its charts."""

    def series(metric: str, name: str = "") -> Series:
        return make_series(name, column(records, metric), buckets)

    def one(metric: str, title: str, note: str = "", *, from_zero: bool = False) -> Chart:
        key = metric.replace("/", "-").replace("_", "-")
        return Chart(key=key, title=title, series=[series(metric, title)], note=note, from_zero=from_zero)

    def several(group: str, labels: Mapping[str, str]) -> list[Series]:
        # Lines without bands, which would hide one another.
        return [Series(name=label, values=series(f"{group}/{name}").values) for name, label in labels.items()]

    means, spreads = series("reward").values, series("reward_std").values
    pairs = [(mean, spread or 0.0) for mean, spread in zip(means, spreads, strict=True)]
    reward = Series(
        name="reward",
        values=means,
        low=[None if mean is None else mean - spread for mean, spread in pairs],
        high=[None if mean is None else mean + spread for mean, spread in pairs],
    )
    band = "mean over the episodes of a step; the band is one standard deviation to each side"
    learning = [
        Chart(key="reward", title="Reward", series=[reward], note=band, wide=True),
        one("loss", "Loss"),
        one("grad_norm", "Gradient norm", "before clipping"),
        one("entropy", "Entropy", "nats a token"),
        one("completions/mean_length", "Completion length", "mean tokens after the prompt", from_zero=True),
        one("completions/clipped_ratio", "Completions cut off", "share that reached the length limit", from_zero=True),
        one("frac_reward_zero_std", "Groups without a signal", "share with equal rewards", from_zero=True),
    ]
    # Only a run that evaluates has the one, only one with a reference policy the other.
    evaluation = one("eval/reward", "Evaluation reward", "held-out tasks; the latest when a step began")
    learning += [chart for chart in (evaluation, one("kl", "KL to the reference", "nats a token")) if chart.has_values]

    staleness = several("staleness", {"mean": "mean", "max": "oldest token"})
    # The mean of several maxima would hide the one that comes near the bound.
    staleness[1].values = series("staleness/max").high or staleness[1].values
    behind, difference = "versions behind the update", "mean |log-probability difference|"
    freshness = [
        Chart(key="staleness", title="Staleness", series=staleness, note=behind, from_zero=True),
        one("sampling/logp_difference_mean", "Engine against trainer", difference, from_zero=True),
    ]

    phases = several("time", {phase: phase for phase in PHASES})
    busy = several("utilisation", {"rollout": "rollout", "train": "training"})
    overlap, share = "seconds of a step; phases may overlap", "share of a step in which at least one was at work"
    speed = [
        one("throughput/tokens_per_s", "Throughput", "trained tokens a second", from_zero=True),
        one("queue/ready", "Ready groups", "waiting for the trainer", from_zero=True),
        Chart(key="time", title="Time by phase", series=phases, note=overlap, stacked=True, from_zero=True, unit=" s"),
        Chart(key="utilisation", title="Utilisation", series=busy, note=share, from_zero=True, top=1.0),
    ]
    mfu = one("throughput/mfu", "Use of the GPUs", "share of the trainer's peak while it works", from_zero=True)
    speed += [mfu] if mfu.has_values else []
    return [("Learning", learning), ("Freshness", freshness), ("Speed", speed)]
