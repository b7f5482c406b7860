"""Curves as inline SVG. Pure.

    records -> buckets of neighbouring steps -> Chart (series of bucket means) -> SVG, and the numbers under the pointer

All charts of a page share the same buckets, so that one pointer position means the same steps in each of them. Colours
come from the page's style sheet by class (s1, s2, ...).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import fmean
from typing import TypeAlias

from rlflow.telemetry.text import number

Values: TypeAlias = list[float | None]
"""One value for each bucket; None where no step of the bucket has one."""

MAX_BUCKETS = 320
HEIGHT = 200
WIDTH, WIDE = 548, 1148
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 24
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


def make_buckets(steps: Sequence[int], max_buckets: int = MAX_BUCKETS) -> list[Bucket]:
    """At most `max_buckets` buckets of as equal a size as can be."""
    count = min(len(steps), max_buckets)
    bounds = [index * len(steps) // count for index in range(count + 1)] if count else [0]
    return [
        Bucket(first=first, end=end, first_step=steps[first], last_step=steps[end - 1])
        for first, end in pairwise(bounds)
    ]


def make_series(name: str, values: Sequence[float | None], buckets: Sequence[Bucket]) -> Series:
    """Bucket means; where a bucket holds several steps, the band spans the least and the greatest of them."""
    held = [[value for value in values[bucket.first : bucket.end] if value is not None] for bucket in buckets]
    series = Series(name=name, values=[fmean(kept) if kept else None for kept in held])
    if any(bucket.end - bucket.first > 1 for bucket in buckets):
        series.low = [min(kept) if kept else None for kept in held]
        series.high = [max(kept) if kept else None for kept in held]
    return series


def positions(buckets: Sequence[Bucket]) -> list[float]:
    """Where each bucket lies along the step axis, from 0 to 1; a single one in the middle."""
    middles = [(bucket.first_step + bucket.last_step) / 2 for bucket in buckets]
    if len(middles) < 2:
        return [0.5 for _ in middles]
    return [(middle - middles[0]) / (middles[-1] - middles[0]) for middle in middles]


def stack(series: Sequence[Series]) -> list[Values]:
    """The upper edge of each series when they stand on one another; nothing adds nothing."""
    edges: list[Values] = []
    below: list[float] = [0.0] * len(series[0].values)
    for one in series:
        below = [under + (value or 0.0) for under, value in zip(below, one.values, strict=True)]
        edges.append(list(below))
    return edges


def axis(chart: Chart) -> tuple[float, float]:
    """Lower and upper end of the value axis; rare spikes far from the rest are cut off, but the pointer tells them."""
    drawn = stack(chart.series) if chart.stacked else [one.values for one in chart.series]
    bands = [] if chart.stacked else [edge for one in chart.series for edge in (one.low, one.high)]
    values = sorted(value for line in [*drawn, *bands] for value in line if value is not None)
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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between the ends."""
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(slots=True)
class _Frame:
    """From values to places in the drawing."""

    width: int
    low: float
    high: float
    across: list[float]

    def x(self, index: int) -> float:
        return LEFT + self.across[index] * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def frame(chart: Chart, buckets: Sequence[Bucket]) -> _Frame:
    low, high = axis(chart)
    return _Frame(width=WIDE if chart.wide else WIDTH, low=low, high=high, across=positions(buckets))


def draw(chart: Chart, buckets: Sequence[Bucket]) -> str:
    """The chart as one SVG element."""
    place = frame(chart, buckets)
    marks = _stacked(chart, place) if chart.stacked else _lines(chart, place)
    label = html.escape(f"{chart.title} by step")
    clip = f"clip-{chart.key}"
    inner_width, inner_height = place.width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    room = f'x="{LEFT - 4}" y="{TOP - 4}" width="{inner_width + 8}" height="{inner_height + 5}"'
    return (
        f'<svg viewBox="0 0 {place.width} {HEIGHT}" role="img" aria-label="{label}" data-chart="{chart.key}">'
        f'<clipPath id="{clip}"><rect {room}/></clipPath>'
        f"{_grid(place)}{_steps(place, buckets)}"
        f'<g clip-path="url(#{clip})">{marks}</g>'
        f'<g class="pointer"><line x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{_dots(chart)}</g></svg>'
    )


def _grid(place: _Frame) -> str:
    parts = []
    for tick in ticks(place.low, place.high):
        y = place.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{place.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    # Steps of round numbers leave dust such as 0.30000000000000004, and 1e-17 for zero.
    if abs(value) < 1e-12:
        return "0"
    # Neighbouring ticks need three digits to differ, whatever their size.
    return number(float(f"{value:.6g}")) if abs(value) >= 1e-3 else f"{value:.3g}"


def _steps(place: _Frame, buckets: Sequence[Bucket]) -> str:
    if not buckets:
        return ""
    y = HEIGHT - 6
    first, last = buckets[0].first_step, buckets[-1].last_step
    if len(buckets) == 1:
        return f'<text class="tick" x="{place.x(0):.1f}" y="{y}" text-anchor="middle">{buckets[0].label}</text>'
    start, end = (first + buckets[0].last_step) / 2, (buckets[-1].first_step + last) / 2
    whole = [round(tick) for tick in ticks(start, end, 6) if abs(tick - round(tick)) < 1e-6]
    span = place.width - LEFT - RIGHT
    places = {step: LEFT + (step - start) / (end - start) * span for step in whole}
    return "".join(
        f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>' for step, x in places.items()
    )


def _runs(values: Values) -> list[list[int]]:
    """Indices of neighbours that all have a value."""
    present = groupby(range(len(values)), key=lambda index: values[index] is not None)
    return [list(indices) for is_present, indices in present if is_present]


def _path(place: _Frame, indices: Sequence[int], values: Values) -> str:
    points = (f"{place.x(index):.1f},{place.y(value):.1f}" for index in indices if (value := values[index]) is not None)
    return " ".join(points)


def _lines(chart: Chart, place: _Frame) -> str:
    parts = []
    for rank, one in enumerate(chart.series, start=1):
        if one.low:
            for run in _runs(one.low):
                edge = f"{_path(place, run, one.high)} {_path(place, run[::-1], one.low)}"
                parts.append(f'<polygon class="band s{rank}" points="{edge}"/>')
        for run in _runs(one.values):
            if len(run) == 1:
                x, y = _path(place, run, one.values).split(",")
                parts.append(f'<circle class="dot s{rank}" cx="{x}" cy="{y}" r="3.5"/>')
            else:
                parts.append(f'<polyline class="line s{rank}" points="{_path(place, run, one.values)}"/>')
    return "".join(parts)


def _stacked(chart: Chart, place: _Frame) -> str:
    edges = stack(chart.series)
    floor: Values = [0.0] * len(edges[0])
    parts = []
    for rank, (upper, lower) in enumerate(zip(edges, [floor, *edges[:-1]], strict=True), start=1):
        if len(upper) == 1:
            top, bottom = place.y(upper[0] or 0.0), place.y(lower[0] or 0.0)
            box = f'x="{place.x(0) - 20:.1f}" y="{top:.1f}" width="40" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="area s{rank}" {box}/>')
            continue
        indices = range(len(upper))
        edge = f"{_path(place, indices, upper)} {_path(place, indices[::-1], lower)}"
        parts.append(f'<polygon class="area s{rank}" points="{edge}"/>')
    return "".join(parts)


def _dots(chart: Chart) -> str:
    return "".join(f'<circle class="dot s{rank}" r="4"/>' for rank in range(1, len(chart.series) + 1))


def pointer_data(chart: Chart, buckets: Sequence[Bucket]) -> dict[str, object]:
    """What the page's script needs to follow the pointer: the series' names, texts and places, bucket by bucket."""
    place = frame(chart, buckets)
    drawn = stack(chart.series) if chart.stacked else [one.values for one in chart.series]
    return {
        "width": place.width,
        "unit": chart.unit,
        "names": [one.name for one in chart.series],
        "texts": [[number(value) for value in one.values] for one in chart.series],
        "heights": [[None if value is None else round(place.y(value), 1) for value in line] for line in drawn],
    }
