"""A curve of the whole run in one row of characters, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

UNICODE_LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_LEVELS = "_.-=+*%#"


class Curve:
    """The run's values, each point the mean of as many neighbours as it takes to stay below `max_points` points."""

    def __init__(self, max_points: int = 512) -> None:
        assert max_points >= 2 and max_points % 2 == 0, f"max_points must be even and at least 2; got {max_points}"
        self._max_points = max_points
        self._points: list[float] = []
        self._pending: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self._points.append(fmean(self._pending))
        self._pending = []
        if len(self._points) == self._max_points:
            self._points = [fmean(self._points[index : index + 2]) for index in range(0, self._max_points, 2)]
            self._stride *= 2

    @property
    def points(self) -> list[float]:
        """Oldest first; the last one may stand for fewer values than the others."""
        return [*self._points, fmean(self._pending)] if self._pending else list(self._points)


def sparkline(points: Sequence[float], width: int, levels: str = UNICODE_LEVELS) -> str:
    """At most `width` characters, from the lowest level at the least value to the highest at the greatest."""
    if not points or width < 1:
        return ""
    count = min(width, len(points))
    bounds = [index * len(points) // count for index in range(count + 1)]
    means = [fmean(points[start:end]) for start, end in pairwise(bounds)]
    low, high = min(means), max(means)
    step = (high - low) / (len(levels) - 1)
    return "".join(levels[round((mean - low) / step)] if step > 0 else levels[0] for mean in means)
