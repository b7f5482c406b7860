"""One run from its settings to its report: directory, environment, model, Ray, driver, telemetry, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlflow.algorithms.chosen import check_functions
from rlflow.checkpoint import RunState, read_state
from rlflow.cluster.start import Fleet, ray_cluster, start_fleet, stop_fleet
from rlflow.config import Config
from rlflow.config_checks import check
from rlflow.driver import Driver
from rlflow.environments import held_out_tasks, load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import RunError
from rlflow.ledger import Ledger
from rlflow.models import resolve_model, resolve_reward_model
from rlflow.rundir import RunDir, claim
from rlflow.sampler import TaskSampler
from rlflow.telemetry.observer import RunObserver
from rlflow.types import Task

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Run:
    """What is known before anything is started."""

    config: Config
    spec: EnvironmentSpec
    sampler: TaskSampler
    evaluation_tasks: Sequence[Task]
    model_path: str
    reward_model_path: str | None
    run_dir: RunDir
    state: RunState | None


def train(config: Config) -> int:
    """Run to the last step, or to the end of the step in which SIGINT or SIGTERM came.

    Returns the exit code: 0 when all steps are done, 128 + the signal when it ended before.
    Raises ConfigError before anything is started, RunError when the run cannot go on.
    """
    check(config)
    check_functions(config)
    spec = load_environment(config.env, config.reward)
    # Before anything is started: a wrong row of the data set ends here.
    sampler = TaskSampler(spec.tasks(), config.run.seed, config.curriculum)
    evaluation_tasks = held_out_tasks(config, spec)
    model_path = resolve_model(config.model.path)
    reward_model_path = resolve_reward_model(config.reward.model) if config.reward.model is not None else None
    with claim(config) as run_dir:
        state = read_state(run_dir.resume_from) if run_dir.resume_from else None
        if state is not None and state.step >= config.run.steps:
            print(f"{run_dir.path} already has {state.step} of {config.run.steps} steps; raise run.steps to go on")
            return 0
        # Workers write to it too.
        config = replace(config, run=replace(config.run, dir=str(run_dir.path)))
        run = _Run(
            config=config,
            spec=spec,
            sampler=sampler,
            evaluation_tasks=evaluation_tasks,
            model_path=model_path,
            reward_model_path=reward_model_path,
            run_dir=run_dir,
            state=state,
        )
        with ray_cluster(config), RunObserver(config, run_dir, state) as observer:
            ended_by = asyncio.run(_train(run, observer))
            observer.finish()
    return 0 if ended_by is None else 128 + ended_by


async def _train(run: _Run, observer: RunObserver) -> signal.Signals | None:
    """The signal that ended the run before its last step, if one did."""
    stopper = _Stopper(observer.message)
    observer.phase("starting")
    try:
        starting = start_fleet(run.config, run.model_path, run.spec, observer.alarm, run.reward_model_path)
        fleet = await stopper.until_stopped(starting)
        if fleet is None:
            return stopper.signal
        ledger = Ledger(run.run_dir.ledger)
        try:
            steps = await _drive(run, observer, fleet, ledger, stopper)
        finally:
            ledger.close()
            await stop_fleet(fleet)
        return stopper.signal if steps < run.config.run.steps else None
    finally:
        stopper.restore()


async def _drive(run: _Run, observer: RunObserver, fleet: Fleet, ledger: Ledger, stopper: _Stopper) -> int:
    """The steps that are done in the end."""
    observer.runners = fleet.workers.runners
    driver = Driver(
        config=run.config,
        workers=fleet.workers,
        sampler=run.sampler,
        ledger=ledger,
        checkpoints=run.run_dir.checkpoints,
        observer=observer,
        evaluation_tasks=run.evaluation_tasks,
    )
    stopper.on_stop = driver.request_stop
    watch = asyncio.create_task(_watch_engines(fleet, driver))
    try:
        if run.state is not None and run.run_dir.resume_from is not None:
            await driver.restore(run.run_dir.resume_from, run.state)
            done = f"{run.state.step} of {run.config.run.steps}"
            observer.message(f"resumed at step {done}, version {run.state.version}")
        await driver.run()
        return driver.step
    finally:
        watch.cancel()


async def _watch_engines(fleet: Fleet, driver: Driver) -> None:
    """A run without engines would otherwise end at a deadline only."""
    try:
        await fleet.engine_fleet.failed()
    except RunError as error:
        driver.fail(error)


class _Stopper:
    """The first SIGINT or SIGTERM asks to stop; another SIGINT, from somebody who has read that, leaves at once.

    Another SIGTERM changes nothing: a job is often asked by several at the same time.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        """The first one."""
        self.on_stop: Callable[[], None] | None = None
        self._tell = tell
        self._stopped = asyncio.Event()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def restore(self) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def until_stopped(self, starting: Coroutine[Any, Any, Fleet]) -> Fleet | None:
        """The fleet, or None when a signal came before it was ready."""
        start = asyncio.create_task(starting)
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return None

    def _handle(self, number: signal.Signals) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                sys.stderr.write("rlflow: stopped at once; the last complete checkpoint is kept\n")
                sys.stderr.flush()
                os._exit(128 + signal.SIGINT)
            return
        self.signal = number
        self._stopped.set()
        if self.on_stop is None:
            self._tell("stopping; nothing has been trained yet")
            return
        self._tell("stopping: finishing the step and saving; Ctrl-C once more to leave at once")
        self.on_stop()
