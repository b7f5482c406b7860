"""A clock that is never set, and the spans of processes whose clock is another one."""

from __future__ import annotations

import pytest

from rlflow.runtime import clock
from rlflow.runtime.clock import as_seen_here, steady
from rlflow.types import Span


def span(start_s: float, end_s: float) -> Span:
    return Span(actor="runner", name="rollout", start_s=start_s, end_s=end_s)


def test_a_steady_clock_reads_the_time_of_day_once() -> None:
    wall, ticks = iter([1000.0]), iter([50.0, 50.0, 51.5, 60.0])
    now = steady(lambda: next(wall), lambda: next(ticks))
    assert [now(), now(), now()] == [1000.0, 1001.5, 1010.0]


@pytest.mark.parametrize(
    ("measured", "seen"),
    [
        ([span(101, 102), span(103, 109)], [span(101, 102), span(103, 109)]),
        ([span(3701, 3702), span(3703, 3709)], [span(102, 103), span(104, 110)]),  # an hour ahead
        ([span(-3599, -3598), span(-3597, -3591)], [span(102, 103), span(104, 110)]),  # an hour behind
        ([], []),
    ],
)
def test_spans_of_another_clock_end_with_their_answer(
    measured: list[Span], seen: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 110.0)
    assert as_seen_here(measured, asked_s=100.0) == seen
