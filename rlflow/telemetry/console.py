"""What a person sees while a run goes on: a live display on a terminal, one plain line a step anywhere else.

NO_COLOR switches colours off. Text from the model or from an environment is escaped before it is shown and is never
read as markup.
"""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self, TextIO

from rlflow.telemetry.metrics import StepRecord
from rlflow.telemetry.samples import ShownEpisode, rows, title
from rlflow.telemetry.text import duration, number, percent, printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

PLAIN_WIDTH = 100
"""Characters in a row of a sample when there is no terminal to ask."""
WIDTH = 78
"""Columns of the live display."""
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
    """Shows one run. Use it as a context manager, so that the terminal is left in order whatever happens.

    Everything that stays on a terminal is printed above the display, which takes WIDTH columns whatever the terminal
    has: a wider one would break into pieces when somebody makes the window narrower.
    """

    def __init__(
        self,
        total_steps: int,
        run_dir: Path,
        stream: TextIO | None = None,
        *,
        before: Sequence[StepRecord] = (),
        is_asynchronous: bool = False,
    ) -> None:
        """`stream` is standard output when None. `before`: the records of a run that goes on."""
        self._total_steps, self._run_dir = total_steps, run_dir
        self._stream = sys.stdout if stream is None else stream
        self._is_asynchronous = is_asynchronous
        self._phase, self._phase_since_s = "", time.monotonic()
        self._told_phases: set[str] = set()
        self._record: StepRecord = {}
        self._held_out: float | None = None
        self._rewards = Curve()
        self._step_times_s: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._num_alarms = 0
        self._last_alarm = ""
        self._shown_system = ""
        self._rich: RichConsole | None = None
        self._live: Live | None = None
        for record in before:
            self._add(record)

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            rich = RichConsole(file=self._stream, highlight=False)
            if not rich.is_dumb_terminal:
                self._rich = rich
                self._live = Live(get_renderable=self._display, console=rich, refresh_per_second=4)
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._rich = None

    def phase(self, name: str) -> None:
        """What the run does now."""
        if name == self._phase:
            return
        before, took = self._phase, duration(time.monotonic() - self._phase_since_s)
        self._phase, self._phase_since_s = name, time.monotonic()
        if not self._step_times_s and name not in self._told_phases:
            # Until the first step there is no line that would show that the run is alive.
            self._told_phases.add(name)
            self.message(f"{name} ..." + (f" ({before} took {took})" if before else ""))

    def step(self, record: StepRecord) -> None:
        """The record of a finished step."""
        self._add(record)
        if (step_time := record.get("step_time")) is not None:
            self._step_times_s.append(step_time)
        figures = self._figures()
        if self._live is None:
            self._plain(plain_line(record, self._total_steps, figures, self._time_left()))
        else:
            self._line(plain_line(record, self._total_steps, figures[:3]), style="")
            self._live.refresh()

    def evaluated(self, reward: float) -> None:
        """The held-out reward of a finished evaluation."""
        self._held_out = reward

    def message(self, text: str) -> None:
        """A line that stays."""
        self._line(text, style="")

    def alarm(self, text: str) -> None:
        """Something that a person should look at; it stays in sight."""
        self._num_alarms += 1
        self._last_alarm = printable(text).replace("\n", " ")
        self._line(f"ALARM: {text}", style="bold red")

    def samples(self, best: ShownEpisode, worst: ShownEpisode) -> None:
        """The best and the worst episode of a step, each in a bounded number of rows; a system prompt only once."""
        for label, style, episode in (("best", "green", best), ("worst", "yellow", worst)):
            system = "\n".join(each["content"] for each in episode.messages if each["role"] == "system")
            width = PLAIN_WIDTH if self._rich is None else max(self._rich.width - 1, 20)
            self._line(f"-- {title(label, episode)}", style=style)
            self._line("\n".join(rows(episode, width=width, has_system=system != self._shown_system)), style="")
            self._shown_system = system

    def _add(self, record: StepRecord) -> None:
        self._record = record
        if (reward := record.get("reward")) is not None and math.isfinite(reward):
            self._rewards.add(reward)

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

    def _figures(self) -> list[str]:
        """What is shown for a step besides its reward, the most telling first."""
        get = self._record.get
        seconds = "/".join(
            f"{value:.1f}" if value is not None else "-" for value in map(get, ("time/rollout", "time/train"))
        )
        figures = [
            f"entropy {number(get('entropy'))}",
            f"length {number(get('completions/mean_length'))}, {percent(get('completions/clipped_ratio'))} cut",
            f"no signal {percent(get('frac_reward_zero_std'))}"
            if get("distil/kl") is None  # with a teacher every group has one
            else f"from teacher {number(get('distil/kl'))} nats",
        ]
        if get("sampling/logp_difference_mean") is None:  # nothing was sampled: the loss says how it goes
            figures.insert(0, f"loss {number(get('loss'))}")
        if self._held_out is not None:
            figures.append(f"held-out {number(self._held_out)}")
        figures += [f"rollout/train {seconds} s", f"tokens/s {number(get('throughput/tokens_per_s')).replace(' ', '')}"]
        if get("throughput/mfu") is not None:
            figures.append(f"MFU {percent(get('throughput/mfu'))}")
        figures.append(f"grad norm {number(get('grad_norm'))}")
        if self._is_asynchronous:
            ages = f"{number(get('staleness/mean'))}/{number(get('staleness/max'))}"
            figures += [f"staleness mean/max {ages}", f"ready {number(get('queue/ready'))}"]
        return figures

    def _display(self) -> Text:
        """The run's folder and phase, how far it is, the reward so far, figures of the last step, the last alarm."""
        from rich.text import Text

        assert self._rich is not None
        width, times, points = min(self._rich.width - 1, WIDTH), self._step_times_s, self._rewards.points
        is_unicode = self._rich.encoding.lower().startswith("utf")
        step = self._record.get("step") or 0
        phase = f"  {self._phase or 'starting'} {duration(time.monotonic() - self._phase_since_s)}"
        folder = printable(str(self._run_dir))[-max(width - 7 - len(phase), 1) :]
        full, empty = "\u2501\u2500" if is_unicode else "#."
        done = round(24 * min(step / self._total_steps, 1.0))
        took = f"{fmean(times):.2f} s a step, {self._time_left()} left" if times else "no step yet"
        curve = sparkline(points, 40, UNICODE_LEVELS if is_unicode else ASCII_LEVELS)
        spread = f"  {number(min(points))} .. {number(max(points))}" if points else ""
        lines = [
            Text.assemble(("rlflow ", "bold"), folder, (phase, "dim")),
            Text.assemble(
                (f"step {step}/{self._total_steps}  ", "bold"), full * done, empty * (24 - done), f"  {took}"
            ),
            Text.assemble(
                "reward ", (number(self._record.get("reward")), "bold green"), "  ", (curve, "green"), spread
            ),
        ]
        if self._record:
            # A figure is not broken in two.
            shown = textwrap.wrap("  ".join(figure.replace(" ", "\0") for figure in self._figures()), max(width, 20))
            lines += [Text(line.replace("\0", " ")) for line in shown]
        if self._num_alarms:
            lines.append(Text(f"{self._num_alarms} alarm(s), the last one: {self._last_alarm}", style="bold red"))
        for line in lines:
            line.truncate(width, overflow="ellipsis" if is_unicode else "crop")
        return Text("\n").join(lines)


def plain_line(record: StepRecord, total_steps: int, figures: Sequence[str], time_left: str = "") -> str:
    """One step in one line; without `time_left` the figures alone, which is short enough for a terminal."""
    step, reward = f"step {record.get('step')}/{total_steps}", f"reward {number(record.get('reward'))}"
    if not time_left:
        return "  ".join([step, reward, *figures])
    step_time = record.get("step_time")
    took = "-" if step_time is None else f"{step_time:.2f} s"
    spread = f"(std {number(record.get('reward_std'))})"
    return "  ".join([step, f"{reward} {spread}", *figures, took, f"left {time_left}"])


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
