"""A run's folder -> what is known of the run. Reads only, also while the run writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlflow.errors import ConfigError, first_line
from rlflow.rundir.directory import FAILURE
from rlflow.rundir.lock import is_held
from rlflow.settings.stop_when import StopRule
from rlflow.telemetry import metrics
from rlflow.telemetry.report.curves import Records, column

REWARD, HELD_OUT = "reward", "eval/reward"
LAST_STEPS = 5
"""Steps at the end whose mean reward is the final one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    folder: Path
    settings: dict[str, Any]
    """config.yaml."""
    records: Records
    evaluations: Records
    state: str
    """running, finished, interrupted, failed."""
    reason: str
    """Why it failed; empty otherwise."""
    changed_s: float
    """When it last wrote, in seconds since the epoch."""

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    def of(self, section: str, name: str) -> Any:
        """A setting; None when the run knows none of this name."""
        return (self.settings.get(section) or {}).get(name)

    def curve(self, metric: str) -> dict[int, float]:
        """Step -> value, for the steps that have one."""
        records = self.evaluations if metric.startswith("eval/") else self.records
        pairs = zip(records, column(records, metric), strict=True)
        return {record["step"]: value for record, value in pairs if value is not None}

    def final(self, metric: str) -> float | None:
        """The last evaluation; of anything else the mean of the last LAST_STEPS steps. None without any."""
        last = list(self.curve(metric).values())[-1 if metric.startswith("eval/") else -LAST_STEPS :]
        return sum(last) / len(last) if last else None


def read_run(folder: Path) -> Run:
    """Raises ConfigError for a folder that holds no run, RunError for files that a run does not write so."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text())
        planned = settings["run"]["steps"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is not a run's directory: its config.yaml cannot be read ({first_line(error)}); give the "
            "run.dir that `rlflow train` printed"
        ) from error
    files = folder / "metrics.jsonl", folder / "evaluations.jsonl"
    records, evaluations = (metrics.read(file) if file.is_file() else [] for file in files)
    failure = folder / FAILURE
    reason = failure.read_text() if failure.is_file() else ""
    if is_held(folder):
        state, reason = "running", ""
    elif reason:
        state = "failed"
    else:
        is_done = bool(records) and records[-1]["step"] >= planned
        if records and (rule := settings["run"].get("stop_when")) is not None:
            is_done |= StopRule.of(rule).is_met({**records[-1], **(evaluations[-1] if evaluations else {})})
        state = "finished" if is_done else "interrupted"
    changed_s = max(file.stat().st_mtime for file in (path, *files) if file.is_file())
    return Run(
        folder=folder,
        settings=settings,
        records=records,
        evaluations=evaluations,
        state=state,
        reason=reason,
        changed_s=changed_s,
    )
