"""The time of day for traces and records: it begins as the machine's clock does, and is never set back or forward.

A machine's clock may be set while a run goes on; what is measured between two of its readings would be wrong by hours.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlflow.types import Span


def steady(wall: Callable[[], float], ticks: Callable[[], float]) -> Callable[[], float]:
    """Seconds since the epoch: what `wall` said when this clock was first read, plus what `ticks` has counted since."""
    ahead_s: float | None = None

    def now() -> float:
        nonlocal ahead_s
        if ahead_s is None:
            ahead_s = wall() - ticks()
        return ticks() + ahead_s

    return now


now = steady(time.time, time.monotonic)
"""This process's clock."""


def as_seen_here(spans: Sequence[Span], asked_s: float) -> list[Span]:
    """The spans of a worker's answer that has just come, and was asked for at `asked_s`, on this process's clock.

    The work was done between the question and the answer. If the spans are not, the worker's clock is another one; they
    are moved so that the last one ends now.
    """
    answered_s = now()
    last_s = max((span.end_s for span in spans), default=answered_s)
    if last_s <= answered_s and all(asked_s <= span.start_s for span in spans):
        return list(spans)
    shift_s = answered_s - last_s
    return [replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s) for span in spans]
