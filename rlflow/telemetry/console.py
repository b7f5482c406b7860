"""What a person sees while a run goes on: a live display on a terminal, one plain line a step anywhere else.

NO_COLOR switches colours off. Text from the model or from an environment is escaped before it is shown and is never
read as markup.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self, TextIO

from rlflow.telemetry.metrics import StepRecord
from rlflow.telemetry.samples import ShownEpisode, rows, title
from rlflow.telemetry.text import duration, number, printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table

PLAIN_WIDTH = 100
"""Characters in a row of a sample when there is no terminal to ask."""
STEPS_FOR_TIME_LEFT = 20
UNICODE_LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_LEVELS = "_.-=+*%#"


class Curve:
    """The values of the whole run in fewer than `max_points` points: each is the mean of equally many neighbours."""

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
        """Oldest first; the last point may stand for fewer values than the others."""
        return [*self._points, fmean(self._pending)] if self._pending else list(self._points)


class Console:
    """Shows one run. Use it as a context manager, so that the terminal is left in order whatever happens."""

    def __init__(self, total_steps: int, run_dir: Path, stream: TextIO | None = None) -> None:
        """`stream` is standard output when None."""
        self._total_steps, self._run_dir = total_steps, run_dir
        self._stream = sys.stdout if stream is None else stream
        self._phase, self._phase_since_s = "starting", time.monotonic()
        self._record: StepRecord = {}
        self._rewards = Curve()
        self._step_times_s: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._num_alarms = 0
        self._last_alarm = ""
        self._rich: RichConsole | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            rich = RichConsole(file=self._stream, highlight=False)
            if not rich.is_dumb_terminal:
                self._rich = rich
                self._live = Live(get_renderable=self._panel, console=rich, refresh_per_second=4)
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._rich = None

    def phase(self, name: str) -> None:
        """What the run does now."""
        if name == self._phase and self._record:
            return
        self._phase, self._phase_since_s = name, time.monotonic()
        if self._rich is None and not self._record:
            # Until the first step there is no line that would show that the run is alive.
            self._plain(f"{name} ...")

    def step(self, record: StepRecord) -> None:
        """The record of a finished step."""
        self._record = record
        reward, step_time = record.get("reward"), record.get("step_time")
        if reward is not None and math.isfinite(reward):
            self._rewards.add(reward)
        if step_time is not None:
            self._step_times_s.append(step_time)
        if self._live is not None:
            self._live.refresh()
        else:
            self._plain(plain_line(record, self._total_steps, self._time_left()))

    def message(self, text: str) -> None:
        """A line that stays."""
        self._line(text, style="")

    def alarm(self, text: str) -> None:
        """Something that a person should look at; it stays in sight."""
        self._num_alarms += 1
        self._last_alarm = printable(text).replace("\n", " ")
        self._line(f"ALARM: {text}", style="bold red")

    def samples(self, best: ShownEpisode, worst: ShownEpisode) -> None:
        """The best and the worst episode of a step, each in a bounded number of rows."""
        for label, style, episode in (("best", "green", best), ("worst", "yellow", worst)):
            if self._rich is None:
                self._plain("\n".join([f"-- {title(label, episode)}", *rows(episode, width=PLAIN_WIDTH)]))
            else:
                from rich.panel import Panel
                from rich.text import Text

                text = Text("\n".join(rows(episode, width=max(self._rich.width - 4, 20))))
                heading = Text(title(label, episode))
                self._rich.print(Panel(text, title=heading, title_align="left", border_style=style))

    def _line(self, text: str, style: str) -> None:
        if self._rich is None:
            self._plain(printable(text))
            return
        from rich.text import Text

        self._rich.print(Text(printable(text), style=style))

    def _plain(self, text: str) -> None:
        encoding = self._stream.encoding or "ascii"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _time_left(self) -> str:
        step = self._record.get("step")
        if step is None or not self._step_times_s:
            return "-"
        return duration(fmean(self._step_times_s) * max(self._total_steps - step, 0))

    # -- the live display

    def _panel(self) -> Panel:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[Table | Text] = [self._rows(), self._figures()]
        if self._num_alarms:
            text = f"{self._num_alarms} alarm(s), the last one: {self._last_alarm}"
            parts.append(Text(text, style="bold red", no_wrap=True, overflow="ellipsis"))
        return Panel(
            Group(*parts),
            title=Text.assemble(("rlflow ", "bold"), (printable(str(self._run_dir)), "dim")),
            title_align="left",
            subtitle=f"{self._phase} {duration(time.monotonic() - self._phase_since_s)}",
            subtitle_align="right",
        )

    def _rows(self) -> Table:
        """How far the run is, and below it the reward so far."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        assert self._rich is not None
        record, times, points = self._record, self._step_times_s, self._rewards.points
        step = record.get("step") or 0
        levels = UNICODE_LEVELS if self._rich.encoding.lower().startswith("utf") else ASCII_LEVELS
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column()
        table.add_column(ratio=1)
        table.add_column(justify="right")
        table.add_row(
            Text(f"step {step}/{self._total_steps}", style="bold"),
            ProgressBar(total=self._total_steps, completed=step),
            f"{fmean(times):.2f} s a step, {self._time_left()} left" if times else "no step yet",
        )
        table.add_row(
            Text.assemble("reward ", (number(record.get("reward")), "bold green")),
            Text(sparkline(points, max(self._rich.width - 46, 8), levels), style="green", no_wrap=True),
            Text(f"{number(min(points))} .. {number(max(points))}" if points else "", style="dim"),
        )
        return table

    def _figures(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        figures = _figures(self._record)
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in figures:
            table.add_column()
        table.add_row(*(Text(name, style="dim") for name, _ in figures))
        table.add_row(*(Text(value) for _, value in figures))
        return table


def _figures(record: StepRecord) -> list[tuple[str, str]]:
    """(name, value) of what is shown for a step besides its reward."""
    return [
        ("staleness mean/max", f"{number(record.get('staleness/mean'))} / {number(record.get('staleness/max'))}"),
        ("ready", number(record.get("queue/ready"))),
        ("tokens/s", number(record.get("throughput/tokens_per_s"))),
        *([("MFU", number(record["throughput/mfu"]))] if record.get("throughput/mfu") is not None else []),
        ("loss", number(record.get("loss"))),
        ("grad norm", number(record.get("grad_norm"))),
    ]


def plain_line(record: StepRecord, total_steps: int, time_left: str) -> str:
    """One step in one line, for logs."""
    figures = "  ".join(f"{name} {value.replace(' ', '')}" for name, value in _figures(record))
    step_time = record.get("step_time")
    took = "-" if step_time is None else f"{step_time:.2f} s"
    return (
        f"step {record.get('step')}/{total_steps}  reward {number(record.get('reward'))} "
        f"(std {number(record.get('reward_std'))})  {figures}  {took}  left {time_left}"
    )


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
