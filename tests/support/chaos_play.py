"""Faults on one run, one after the other, each judged by how the run went on.

    a step -> the fault -> the run goes on, or its driver ends and is started again -> three new steps -> full strength

A fault is over when the run has done three steps that it had not done before: what came before them is lost time.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import Effect, inject
from chaos_plan import Fault, Scenario
from chaos_run import GROUPS_PER_STEP, NUM_TASKS, ChaosRun, Ended, restarts
from run_checks import Expected, given_up, violations
from world import Observation, left_behind, observe

NEW_STEPS = 3
START_S, RECOVERY_S, STRENGTH_S, GONE_S = 300.0, 300.0, 120.0, 15.0
"""Until a started run trains, until a hit one does again, until it has all of its processes again, and until the
processes of a driver that has ended are gone."""
TAIL_LINES = 25


@dataclass(kw_only=True, slots=True)
class Row:
    """What became of one fault."""

    number: int
    scenario: str
    name: str
    hit: str
    outcome: str = ""
    seconds_lost: float | None = None
    """More than as many steps take without a fault."""
    seconds_to_full_strength: float | None = None
    broken: list[str] = field(default_factory=list)
    """Promises of the run that did not hold."""
    left: list[str] = field(default_factory=list)
    """What the driver left in the world when it ended by itself, and what was there at the end and came with this
    fault."""


@dataclass(kw_only=True, slots=True)
class Played:
    """A scenario with all of its faults."""

    scenario: str
    rows: list[Row]
    broken: list[str]
    """At the end of the run."""
    steps: int
    given_up: int
    """Tasks that were not trained in one pass, for a reason that the ledger gives."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Play:
    """One scenario. Everything that it says goes to stderr."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Sequence[Fault],
        folder: Path,
        settings: tuple[str, ...] = (),
        toy: str | None = None,
        longest_s: float = math.inf,
    ) -> None:
        """No fault begins later than `longest_s` after the run was started."""
        self._faults, self._longest_s = faults, longest_s
        self._run = ChaosRun(scenario, folder, settings, toy)
        self._expected = Expected(
            num_tasks=NUM_TASKS, groups_per_step=GROUPS_PER_STEP, max_versions=scenario.max_versions
        )
        self._most_steps = 0
        """That were ever done; those since the last checkpoint are done again after a loss."""
        self._strength: Counter[str] = Counter()
        self._first_seen: dict[str, int] = {}
        """What was left -> index of the fault after which it was there for the first time."""
        self._before: Observation

    def play(self) -> Played:
        self._before, last_s = observe(), time.monotonic() + self._longest_s
        run, rows, broken = self._run, list[Row](), list[str]()
        with run:
            run.start()
            assert self._wait_for_steps(START_S), f"the run did not start: {self._tail()}"
            self._strength = run.census()
            self._say(f"{run.scenario.name}: {dict(self._strength)}")
            for index, fault in enumerate(self._faults):
                if time.monotonic() > last_s:
                    break
                try:
                    rows.append(self._one(fault))
                except AssertionError as error:
                    broken.append(f"{fault}: {error}")
                    break
                for each in left_behind(self._before, observe()):
                    self._first_seen.setdefault(each, index)
                self._say_row(rows[-1])
            code = self._end()
            if code != 128 + signal.SIGINT:
                broken.append(f"the run was interrupted and ended with {code}")
            run.stop_cluster()
            after = self._after()
            broken += violations(run.path, self._expected, self._before, self._before, "".join(run.output))
            for each in left_behind(self._before, after):
                if rows:
                    rows[min(self._first_seen.get(each, len(rows)), len(rows) - 1)].left.append(each)
            failures = len(given_up(run.path))
            steps = run.steps()
        return Played(scenario=run.scenario.name, rows=rows, broken=broken, steps=steps, given_up=failures)

    # -- one fault

    def _one(self, fault: Fault) -> Row:
        run, first_line = self._run, len(self._run.output)
        self._say(str(fault))
        row = Row(number=fault.number, scenario=fault.scenario, name=fault.name, hit="")
        time.sleep(fault.delay_s)
        self._most_steps = max(self._most_steps, run.steps())
        num_killed = len(run.killed_as_hung())
        usual_s, began_s = run.step_s(), time.monotonic()
        try:
            effect = inject(run, fault)
        except (AssertionError, Ended) as error:
            row.broken.append(f"the fault went another way: {error!r}")
            effect = Effect(hit="", may_end=frozenset({0, 1, 2}))
        if effect is None:
            row.outcome = "nothing to hit"
            return row
        row.hit = effect.hit
        recovered_s = self._recover(effect, row, began_s)
        row.seconds_lost = max(0.0, round(recovered_s - began_s - NEW_STEPS * usual_s, 1))
        self._most_steps = run.steps()
        self._wait_for_strength(effect, row, began_s)
        row.outcome += f", {n} from the checkpoint" if (n := restarts(run.output[first_line:])) else ""
        if fault.action != "hang":
            row.broken += [f"taken for hung: {each}" for each in run.killed_as_hung()[num_killed:]]
        printed = "".join(run.output[first_line:])
        row.broken += violations(run.path, self._expected, self._before, self._before, printed, is_over=False)
        if row.broken:
            self._say("".join(run.output[first_line:][-TAIL_LINES:]))
        return row

    def _recover(self, effect: Effect, row: Row, began_s: float) -> float:
        """Until there are new steps, with as many drivers as that takes; fills in the outcome. Returns when there were,
        which may be before the fault was undone; but after that there are more."""
        run, undo, went_on_s = self._run, effect.undo, None
        row.outcome = "went on"
        try:
            if undo is not None:
                undo_s = began_s + effect.undo_after_s
                if self._wait_for_steps(undo_s - time.monotonic()):
                    went_on_s = time.monotonic()
                    run.wait(lambda: False, undo_s - time.monotonic())
                self._most_steps = max(self._most_steps, run.steps())
                undo()
                undo = None
            if effect.must_end:
                run.wait(lambda: False, RECOVERY_S)
            elif self._wait_for_steps(RECOVERY_S):
                return went_on_s or time.monotonic()
            row.broken.append(f"no {'end' if effect.must_end else 'step'} within {RECOVERY_S:.0f} s")
            row.outcome = "stuck"
            run.kill_all()
        except Ended:
            row.outcome = f"ended ({run.exit_code})"
            if run.exit_code not in effect.may_end:
                row.broken.append(f"the driver ended with {run.exit_code}")
            if undo is not None:
                undo()
        self._start_again(effect, row)
        return time.monotonic()

    def _start_again(self, effect: Effect, row: Row) -> None:
        run = self._run
        if left := run.wait_until_gone(GONE_S):
            row.left += [f"process: {each}" for each in left]
            run.kill_all()
        if effect.before_restart is not None:
            effect.before_restart()
        self._most_steps = max(self._most_steps, run.steps())
        for _ in range(3):
            run.start()
            try:
                if self._wait_for_steps(START_S):
                    row.outcome += ", resumed"
                    return
                row.broken.append(f"no step within {START_S:.0f} s of the start")
            except Ended:
                row.broken.append(f"started again, it ended with {run.exit_code}: {self._tail(3)}")
            run.kill_all()
            if effect.cure is not None:
                effect.cure()
        raise AssertionError(f"the run cannot be started again: {self._tail()}")

    def _wait_for_strength(self, effect: Effect, row: Row, began_s: float) -> None:
        """Until there are as many processes of each kind as at first. What hangs may be noticed only now."""
        run = self._run

        def missing() -> Counter[str]:
            now = run.census()
            return Counter({kind: n - now[kind] for kind, n in self._strength.items() if n > now[kind]}) - _UNKNOWN

        try:
            if run.wait(lambda: not missing(), STRENGTH_S, look_s=0.2):
                row.seconds_to_full_strength = round(time.monotonic() - began_s, 1)
            else:
                row.broken.append(f"processes that did not come back: {dict(missing())}")
        except Ended:
            row.outcome += f", ended ({run.exit_code})"
            if run.exit_code not in effect.may_end:
                row.broken.append(f"the driver ended with {run.exit_code} after it had gone on")
            self._start_again(effect, row)

    def _wait_for_steps(self, deadline_s: float) -> bool:
        wanted = self._most_steps + NEW_STEPS
        return self._run.wait(lambda: self._run.steps() >= wanted, deadline_s)

    # -- the end

    def _end(self) -> int | None:
        run = self._run
        if run.exit_code is not None:
            return run.exit_code
        run.signal(signal.SIGINT)
        try:
            run.wait(lambda: False, RECOVERY_S)
        except Ended:
            return run.exit_code
        run.kill_all()
        return None

    def _after(self) -> Observation:
        """The world when what was told to end has had a little time for it."""
        self._run.wait_until_gone(GONE_S)
        return observe()

    def _tail(self, lines: int = TAIL_LINES) -> str:
        return "".join(self._run.output[-lines:])

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _say_row(self, row: Row) -> None:
        lost = "-" if row.seconds_lost is None else f"{row.seconds_lost:.1f} s lost"
        full = row.seconds_to_full_strength
        self._say(f"  {row.hit}: {row.outcome}; {lost}; full strength {'-' if full is None else f'{full:.1f} s'}")
        for each in (*row.broken, *(f"left behind: {each}" for each in row.left)):
            self._say(f"  BROKEN: {each}")


_UNKNOWN = Counter({"other": 1000})
"""Processes that come and go."""
