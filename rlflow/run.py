"""One run, from its settings to its report.

    Config -> checks -> environment, tasks, model -> run directory -> Ray -> fleet -> Driver -> report
                                                          ^                          |
                                                          +-- newest checkpoint <-- Setback: a process was lost

Rules: whatever the settings can have wrong is found before anything is started. One process writes a run's directory.
A signal ends the run after its step, with everything saved. After a loss of what only checkpoints hold, the run goes on
from the newest one, at most MAX_RESTARTS times without a newer one.
"""

import asyncio
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rlflow.algorithms.registry import check_functions
from rlflow.cluster.devices import hardware, has_gpus, wait_until_there_is_room
from rlflow.cluster.start import Fleet, ray_cluster, run_unless_lost, start_fleet
from rlflow.config import Config
from rlflow.driver import Driver
from rlflow.environments.find import held_out_tasks, load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerLost, describe_failure, first_error_stands
from rlflow.groups.ledger import Ledger
from rlflow.groups.sampler import TaskSampler
from rlflow.models.resolve import resolve_model, resolve_reward_models
from rlflow.rewards.models import model_paths
from rlflow.rollout.hint import check_hints
from rlflow.rundir.directory import RunDir, claim, rewound
from rlflow.rundir.restarts import MAX_RESTARTS, Restarts, Setback, larger_setback
from rlflow.rundir.store import RunState
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import by_device, learns_from_rewards
from rlflow.runtime.signals import Stopper, run_until_done
from rlflow.settings.checks import check
from rlflow.settings.demonstrations import check_demonstrations
from rlflow.settings.stop_when import StopRule
from rlflow.settings.teacher_checks import check_kinds
from rlflow.telemetry import about
from rlflow.telemetry.metrics import check_metric
from rlflow.telemetry.observer import RunObserver
from rlflow.telemetry.text import duration
from rlflow.telemetry.trackers import check_trackers
from rlflow.types import Task
from rlflow.workers.engine.tokens import check_shown, check_tokens
from rlflow.workers.teachers import check_teachers, with_folders
from rlflow.workers.trainer.heads import check_heads

ACCEPT_EDITED = "accept_edited_tasks"
"""A file of this name in run.dir says to go on although tasks were edited."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Run:
    """What is known before anything is started."""

    config: Config
    spec: EnvironmentSpec
    tasks: Sequence[Task]
    rows: str
    """Their digests."""
    evaluation_tasks: Sequence[Task]
    model_path: str
    reward_models: Mapping[str, str]
    run_dir: RunDir
    setback: Setback | None = None
    """The loss that this start makes up for; None at the first start of this process."""


def train(config: Config) -> tuple[Path, signal.Signals | None]:
    """Run to the last step, or to the end of the step in which SIGINT, SIGTERM or SIGHUP came.

    Both `rlflow train` and `rlflow.train` call it. Returns the run's directory, and the signal that ended it before its
    last step. Raises ConfigError before anything is started, RunError when the run cannot go on.
    """
    check(config)
    check_trackers(config.trackers)
    check_functions(config)
    if config.run.stop_when is not None:
        check_metric(StopRule.of(config.run.stop_when).metric)
    spec = load_environment(config.env, config.reward, needs_reward=learns_from_rewards(config))
    # Before anything is started: a wrong row of the data set, or a curriculum that does not exist, fails here.
    tasks = spec.tasks()
    sampler = TaskSampler(tasks, config.run.seed, config.curriculum)
    evaluation_tasks = held_out_tasks(config, spec)
    model_path = resolve_model(config.model.path)
    check_demonstrations(config, tasks)
    check_tokens(config, model_path)
    check_heads(config, model_path)
    check_kinds(config, {task.kind for task in tasks})
    check_hints(config.teacher, tasks)
    taught = with_folders(config)
    check_teachers(taught, model_path)
    check_shown(config, model_path, chain(tasks, evaluation_tasks))
    reward_models = resolve_reward_models(model_paths(config.reward))
    with claim(config) as run_dir, _faults_kept_in(run_dir.path):
        state = run_dir.state
        if state is not None and state.step >= config.run.steps:
            print(f"{run_dir.path} already has {state.step} of {config.run.steps} steps; raise run.steps to go on")
            return run_dir.path, None
        if state is not None:
            _check_same_tasks(run_dir, sampler, state)
        run = _Run(
            # Workers write to it too.
            config=replace(taught, run=replace(config.run, dir=str(run_dir.path))),
            spec=spec,
            tasks=tasks,
            rows=sampler.rows,
            evaluation_tasks=evaluation_tasks,
            model_path=model_path,
            reward_models=reward_models,
            run_dir=run_dir,
        )
        began_s = time.monotonic()
        with ray_cluster(run.config, run_dir.path):
            print(f"Ray ready after {duration(time.monotonic() - began_s)}", flush=True)
            run = replace(run, config=by_device(run.config, on_gpus=has_gpus()))
            check(run.config)  # what null has become may be refused
            return run_dir.path, run_until_done(_train(run))


def _check_same_tasks(run_dir: RunDir, sampler: TaskSampler, state: RunState) -> None:
    """Raises ConfigError for other tasks than the checkpoint's, and for edited ones unless a file accepts them."""
    sampler.restore(state.sampler)
    edited, accepted = sampler.edited(state.sampler), run_dir.path / ACCEPT_EDITED
    if edited and not accepted.exists():
        raise ConfigError(
            f"{edited} were edited since {run_dir.resume_from} was saved; restore the data, begin another run.dir, or "
            f"make the file {accepted} to go on with them as they are now"
        )
    if edited:
        print(f"ALARM: {edited} were edited since {run_dir.resume_from} was saved; {accepted} accepts it", flush=True)


@contextmanager
def _faults_kept_in(folder: Path) -> Iterator[None]:
    """Turn an error that nobody has written for people into one line; its traceback goes to a file of the folder."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        whole, file = "".join(traceback.format_exception(error)), folder / "traceback.txt"
        try:
            file.write_text(whole, errors="backslashreplace")
            where = f"in {file}"
        except OSError as second:
            where = f"here, because {file} cannot be written ({second.strerror}):\n{whole}"
        fault = "this is a fault of rlflow or of a plugin, and its traceback is"
        told = RunError(f"{describe_failure(error)}; {fault} {where}")
        for note in getattr(error, "__notes__", []):
            told.add_note(note)
        raise told from error


async def _train(run: _Run) -> signal.Signals | None:
    """Start the fleet and drive it, and do both again after a loss, from the newest checkpoint.

    Returns the signal that ended the run before its last step, if one did.
    """
    stopper = Stopper(lambda: _last_saved(run.run_dir))
    restarts = Restarts(run.run_dir.state.step if run.run_dir.state else 0)
    try:
        while True:
            with RunObserver(run.config, run.run_dir, run.setback) as observer:
                fleet: Fleet | None = None
                status = asyncio.create_task(observer.status.keep())
                try:
                    fleet = await stopper.run_unless_stopped(_start(run, observer), observer.message)
                    if fleet is None:
                        return stopper.signal
                    steps = await run_unless_lost(fleet, _drive(run, observer, fleet, stopper))
                    if stopper.signal is None or steps >= run.config.run.steps:
                        return None
                    observer.message(f"to go on: {resume_command(run.run_dir.path, sys.orig_argv)}")
                    return stopper.signal
                except (WorkerLost, PayloadLost) as error:
                    if stopper.signal is not None:
                        observer.alarm(f"{error}; {_last_saved(run.run_dir)}, and the run was asked to stop")
                        return stopper.signal
                    if fleet is None and run.setback is None:
                        raise  # it has never worked, so it would fail again
                    run = await _after(error, run, observer, restarts)
                finally:
                    if fleet is not None:
                        with first_error_stands():
                            await fleet.stop()
                    status.cancel()
    finally:
        stopper.restore()


async def _start(run: _Run, observer: RunObserver) -> Fleet:
    is_restart = run.setback is not None
    if is_restart:
        observer.phase("waiting for machines")
        await wait_until_there_is_room(run.config)
    observer.phase("starting")
    fleet = await start_fleet(
        run.config,
        run.model_path,
        run.spec,
        observer.alarm,
        run.reward_models,
        tell=observer.message,
        is_restart=is_restart,
    )
    await asyncio.to_thread(about.amend, run.run_dir.path, machines=hardware())
    for line in fleet.devices.lines():
        observer.message(line)
    return fleet


def resume_command(folder: Path, typed: Sequence[str]) -> str:
    """What goes on with the run in `folder`, which a process with the command line `typed` has begun."""
    words = list(typed[typed.index("train") + 1 :]) if "train" in typed else ["..."]
    kept = [word for word in words if not word.startswith(("run.dir=", "run.on_exists="))]
    return shlex.join(["rlflow", "train", *kept, f"run.dir={folder}"])


def _last_saved(run_dir: RunDir) -> str:
    steps = run_dir.checkpoints.steps()
    return f"step {steps[-1]} is the last that was saved" if steps else "nothing has been saved yet"


async def _after(error: WorkerLost | PayloadLost, run: _Run, observer: RunObserver, restarts: Restarts) -> _Run:
    """The run from its newest whole checkpoint on. Raises the error when it was restarted from there too often."""
    observer.phase("checking the checkpoint")
    checking = asyncio.to_thread(rewound, run.run_dir)
    run_dir = await within("checking the checkpoint", run.config.deadlines.checkpoint_s, checking)
    for alarm in run_dir.alarms:
        observer.alarm(alarm)
    step = run_dir.state.step if run_dir.state else 0
    number = restarts.count(error, step)
    setback = larger_setback(run.setback, observer.num_steps)
    observer.alarm(
        f"{error}; the run goes on after step {step}, which is the last that was saved, so that "
        f"{setback.step - step} are done again (restart {number}, of {MAX_RESTARTS} without a newer checkpoint)"
    )
    for note in getattr(error, "__notes__", []):
        observer.message(note)
    return replace(run, run_dir=run_dir, setback=setback)


async def _drive(run: _Run, observer: RunObserver, fleet: Fleet, stopper: Stopper) -> int:
    """Train to the end, or until asked to stop; returns the steps done."""
    observer.runners = fleet.workers.runners
    ledger = await asyncio.to_thread(Ledger, run.run_dir.ledger)
    driver = Driver(
        config=run.config,
        workers=fleet.workers,
        sampler=TaskSampler(run.tasks, run.config.run.seed, run.config.curriculum, run.rows),
        ledger=ledger,
        checkpoints=run.run_dir.checkpoints,
        observer=observer,
        evaluation_tasks=run.evaluation_tasks,
        held_out=observer.held_out,
    )
    stopper.hand_to(driver.request_stop)
    watch = asyncio.create_task(_watch_engines(fleet, driver))
    observer.status.describe = driver.describe
    try:
        state = run.run_dir.state
        if state is not None and run.run_dir.resume_from is not None:
            await driver.restore(run.run_dir.resume_from, state)
            done = f"{state.step} of {run.config.run.steps}"
            observer.message(f"resumed at step {done}, version {state.version}")
        if run.setback is not None:
            observer.message(f"training again {run.setback.seconds:.0f} s after the loss")
        await driver.run()
        observer.finish(driver.ended_early)
        return driver.step
    finally:
        stopper.hand_to(None)
        watch.cancel()
        observer.status.describe = str
        with first_error_stands():
            await asyncio.to_thread(ledger.close)  # waits for the disk


async def _watch_engines(fleet: Fleet, driver: Driver) -> None:
    """End the run when no engine is left; otherwise only a deadline would."""
    try:
        await fleet.engine_fleet.wait_until_failed()
    except RunError as error:
        driver.fail(error)
