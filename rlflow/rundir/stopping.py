"""`rlflow stop RUN`, and how long a run may take to stop."""

from pathlib import Path

import yaml

from rlflow.config import DeadlinesConfig
from rlflow.errors import ConfigError
from rlflow.rundir.lock import stop


def seconds_to_stop(deadlines: DeadlinesConfig) -> float:
    """How long to wait for a run that was asked to stop: each wait of one step, and two checkpoints, the one that is
    being written and the last.

    This is no bound: an evaluation under way takes longer, and so do several waits of one kind that all last until
    their deadline.
    """
    return deadlines.group_s + deadlines.train_s + deadlines.weights_s + 2 * deadlines.checkpoint_s


def stop_run(run: Path, timeout_s: float | None) -> str:
    """Make the run that writes a directory finish its step, save and end. Returns what happened, as text.

    `timeout_s` None waits as long as the run's deadlines allow. Raises ConfigError when its process is on another
    machine, RunError when it takes longer.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"--timeout must be positive; got {timeout_s:g}")
    return stop(run, seconds_to_stop(_deadlines_of(run)) if timeout_s is None else timeout_s)


def _deadlines_of(run: Path) -> DeadlinesConfig:
    """The deadlines that the run was started with; the defaults if it has only just begun."""
    file = run / "config.yaml"
    return DeadlinesConfig(**yaml.safe_load(file.read_text())["deadlines"]) if file.exists() else DeadlinesConfig()
