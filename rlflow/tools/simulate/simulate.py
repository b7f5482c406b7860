"""One simulated run: the real driver, ledger and sampler on a virtual clock, with modelled workers -> Figures.

The driver's processor time is that of the process between the end of the warm-up and the last step, less what the
modelled workers and the observer here have metered of their own. The event loop, its timers and the ledger's SQLite
file count as the driver's, as they would in a run.
"""

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.config import Config
from rlflow.driver import Driver, StepReport
from rlflow.errors import RunError
from rlflow.groups.ledger import Ledger
from rlflow.groups.sampler import TaskSampler
from rlflow.roles import Workers
from rlflow.rundir.store import CheckpointStore
from rlflow.tools.simulate.clock import run_virtually
from rlflow.tools.simulate.models import Meter, ModelledEngines, ModelledRunners, ModelledTrainer
from rlflow.tools.simulate.plan import Figures, Plan
from rlflow.types import Task

_NEVER_S = 1e9
"""Deadlines of the simulated run: nothing can hang here, and the fleet may be as slow as it likes."""
_TELL_S = 5.0
"""Real seconds between two lines that say how far a simulation is."""
_PASS_STEPS = 4
"""Steps that a pass over the tasks lasts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Mark:
    """All counters at the end of one step."""

    now_s: float
    counts: dict[str, int]
    busy_engines_s: float
    busy_trainer_s: float
    num_tokens: int
    processor_s: float
    models_s: float
    rss_mb: float


@dataclass(kw_only=True, slots=True)
class _Watcher:
    """The driver's Observer: marks the first and the last measured step, then ends the simulation.

    Every few seconds it says how far the simulation is.
    """

    plan: Plan
    meter: Meter
    mark: Callable[[dict[str, int]], _Mark]
    over: asyncio.Event
    first: _Mark | None = None
    last: _Mark | None = None
    staleness: Counter[int] = field(default_factory=Counter)
    num_samples: int = 0
    told_s: float = field(default_factory=time.monotonic)

    async def step(self, report: StepReport) -> dict[str, float | int | None]:
        if self.last is not None:
            return {}
        with self.meter:
            if self.first is not None:
                self.staleness.update(report.trained_version - group.oldest_version for group in report.groups)
                self.num_samples += sum(len(group.episodes) for group in report.groups)
        steps = self.plan.warm_up_steps + self.plan.steps
        if time.monotonic() - self.told_s > _TELL_S:
            self.told_s = time.monotonic()
            print(f"staleness {self.plan.max_versions}: step {report.step} of {steps}", file=sys.stderr, flush=True)
        if report.step == self.plan.warm_up_steps:
            self.first = self.mark(report.counts)
        elif report.step == steps:
            self.last = self.mark(report.counts)
            self.over.set()
        return {}

    def _ignore(self, *_: object, **__: object) -> None:
        pass

    phase = dropped = waiting = evaluated = saved = given_up = _ignore


def simulate(plan: Plan) -> Figures:
    """Run a plan that has been checked; RunError when the simulated run stops, as a real one would."""
    gc.collect()  # what an earlier simulation left is not to be paid for by this one
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlflow-simulate-") as folder:
        watcher, runners = run_virtually(_run(plan, Path(folder)))
    first, last = watcher.first, watcher.last
    assert first is not None and last is not None
    seconds = last.now_s - first.now_s
    groups = {name: last.counts[name] - first.counts[name] for name in last.counts}
    dropped = {name.removeprefix("dropped_"): count for name, count in groups.items() if name.startswith("dropped_")}
    driver_s = (last.processor_s - first.processor_s) - (last.models_s - first.models_s)
    return Figures(
        engines=plan.engines,
        slots=plan.slots,
        groups_per_step=plan.step_groups,
        max_versions=plan.max_versions,
        steps=plan.steps,
        step_s=seconds / plan.steps,
        groups_per_s=groups["trained"] / seconds,
        samples_per_s=watcher.num_samples / seconds,
        tokens_per_s=(last.num_tokens - first.num_tokens) / seconds,
        utilisation_engines=(last.busy_engines_s - first.busy_engines_s) / (plan.slots * seconds),
        utilisation_trainer=(last.busy_trainer_s - first.busy_trainer_s) / seconds,
        staleness=dict(sorted(watcher.staleness.items())),
        dropped={name: count for name, count in dropped.items() if count},
        groups_started=runners.num_started,
        groups_ended=runners.num_ended,
        driver_ms_per_group=1000 * driver_s / (groups["trained"] + sum(dropped.values())),
        wall_s=time.perf_counter() - started,
        rss_first_mb=first.rss_mb,
        rss_last_mb=last.rss_mb,
    )


async def _run(plan: Plan, folder: Path) -> tuple[_Watcher, ModelledRunners]:
    """Drive until the last measured step; what is under way then is given up."""
    meter = Meter()
    engines, trainer = ModelledEngines(plan, meter), ModelledTrainer(plan, meter)
    runners = ModelledRunners(plan, engines, meter)

    def mark(counts: dict[str, int]) -> _Mark:
        now_s = asyncio.get_running_loop().time()
        return _Mark(
            now_s=now_s,
            counts=counts,
            busy_engines_s=engines.occupancy.total(now_s),
            busy_trainer_s=trainer.occupancy.total(now_s),
            num_tokens=trainer.num_tokens,
            processor_s=time.process_time(),
            models_s=meter.seconds,
            rss_mb=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )

    watcher = _Watcher(plan=plan, meter=meter, mark=mark, over=asyncio.Event())
    ledger = Ledger(folder / "ledger.db")
    try:
        driver = Driver(
            config=_config(plan),
            workers=Workers(runners=runners, engines=engines, trainer=trainer),
            sampler=TaskSampler(
                [Task(id=f"t{i}", prompt=()) for i in range(_PASS_STEPS * plan.step_groups)], plan.seed
            ),
            ledger=ledger,
            checkpoints=CheckpointStore(folder / "checkpoints", keep=1),
            observer=watcher,
            now=asyncio.get_running_loop().time,
        )
        running, over = asyncio.ensure_future(driver.run()), asyncio.ensure_future(watcher.over.wait())
        await asyncio.wait((running, over), return_when=asyncio.FIRST_COMPLETED)
        stopped_early = running.done()
        running.cancel()
        over.cancel()
        error, _ = await asyncio.gather(running, over, return_exceptions=True)
        if stopped_early and isinstance(error, RunError):
            raise RunError(f"the simulated run stopped: {error}") from error
        if stopped_early:
            assert isinstance(error, BaseException), "the driver ended before the last measured step"
            raise error
    finally:
        ledger.close()
    return watcher, runners


def _config(plan: Plan) -> Config:
    """A run that goes on after the last measured step, so that no group is missing at its end."""
    config = Config()
    config.run.steps = plan.warm_up_steps + plan.steps + plan.max_versions + 1
    config.run.seed, config.run.checkpoint_every = plan.seed, 0
    config.algorithm.groups_per_step, config.algorithm.group_size = plan.step_groups, plan.group_size
    config.staleness.max_versions = plan.max_versions
    config.staleness.order, config.staleness.late = plan.order, plan.late
    config.staleness.max_ready_mb = _NEVER_S
    config.rollout.engines, config.rollout.update = plan.engines, plan.update
    deadlines = config.deadlines
    deadlines.group_s = deadlines.train_s = deadlines.weights_s = deadlines.checkpoint_s = _NEVER_S
    return config
