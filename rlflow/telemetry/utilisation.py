"""How busy a part of the system was: the union of its spans over a window. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rlflow.types import Span


def busy_share(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """The share [0, 1] of the window [start_s, end_s] in which at least one of `spans` was open.

    Overlapping spans count once; what lies outside the window does not count. Times are seconds since the epoch.
    """
    assert start_s < end_s, f"the window [{start_s}, {end_s}] is empty"
    busy_s, covered_until_s = 0.0, start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin_s, finish_s = max(span.start_s, covered_until_s), min(span.end_s, end_s)
        if begin_s < finish_s:
            busy_s += finish_s - begin_s
            covered_until_s = finish_s
    return min(busy_s / (end_s - start_s), 1.0)
