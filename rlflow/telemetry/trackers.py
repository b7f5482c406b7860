"""Where the numbers of a run also go: TensorBoard, Weights & Biases, MLflow. Each is imported only when it is on."""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rlflow.config import TrackersConfig
from rlflow.errors import ConfigError
from rlflow.telemetry.metrics import StepRecord, finite
from rlflow.telemetry.samples import COLUMNS
from rlflow.telemetry.text import shorten

BEST = ("reward", "eval/reward")
"""Whose greatest value stands beside the last one in a service's table of runs."""
NOTE = 4000
"""Characters of a description that every version of MLflow takes."""


class Tracker(Protocol):
    """Takes one record a step. What it raises costs the run nothing but the tracker."""

    def log(self, step: int, record: StepRecord) -> None: ...

    def alarm(self, text: str) -> None: ...

    def samples(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """The episodes that are shown of a step: one row each, of samples.COLUMNS."""

    def close(self) -> None: ...


def open_trackers(
    config: TrackersConfig,
    run_dir: Path,
    flat_config: Mapping[str, Any],
    failed: Callable[[str, Exception], None] | None = None,
) -> list[Tracker]:
    """The trackers that are configured; `flat_config` is the run's configuration by dotted key.

    A run that is resumed goes on under the same name in each. One that does not start is left out if there is `failed`
    to tell; else its error is raised: ConfigError for a package that is not installed or a service that refuses.
    """
    wanted: list[partial[Tracker]] = []
    if config.tensorboard:
        wanted.append(partial(TensorBoardTracker, run_dir / "tensorboard", flat_config))
    if config.wandb_project is not None:
        wanted.append(partial(WandbTracker, config.wandb_project, run_dir, flat_config))
    if config.mlflow_experiment is not None:
        wanted.append(partial(MlflowTracker, config.mlflow_experiment, run_dir, flat_config))
    trackers: list[Tracker] = []
    for opening in wanted:
        try:
            trackers.append(opening())
        except Exception as error:
            if failed is None:
                raise
            failed(opening.func.__name__, error)
    return trackers


def check_trackers(config: TrackersConfig) -> None:
    """Raise ConfigError for a package that is not installed. It imports none, so that a run can ask at once."""
    if config.wandb_project is not None and find_spec("wandb") is None:
        raise _missing("wandb", "trackers.wandb_project", "rlflow[wandb]")
    if config.mlflow_experiment is not None and find_spec("mlflow") is None:
        raise _missing("mlflow", "trackers.mlflow_experiment", "rlflow[mlflow]")


class TensorBoardTracker:
    """Event files, written with TensorBoard's own messages: no torch, no TensorFlow, no thread."""

    def __init__(self, folder: Path, flat_config: Mapping[str, Any]) -> None:
        self._records = _require("tensorboard.summary.writer.record_writer", "trackers.tensorboard=true", "tensorboard")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._parameters = import_module("tensorboard.plugins.hparams.summary_v2")
        self._texts = import_module("tensorboard.plugins.text.summary_v2")
        self._folder = folder
        # As TensorBoard takes them.
        plain = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in flat_config.items()
        }
        self._settings = plain
        self._writer: Any = None

    def log(self, step: int, record: StepRecord) -> None:
        if self._writer is None:
            self._open(step)
        value_of = self._summaries.Summary.Value
        values = [
            value_of(tag=name, simple_value=value) for name, value in _finite_only(record).items() if name != "step"
        ]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def alarm(self, text: str) -> None:
        """TensorBoard has none."""

    def samples(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        if self._writer is None:
            self._open(step)
        self._write(step=step, summary=self._texts.text_pb("samples", [COLUMNS, *rows]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> None:
        # TensorBoard reads the files in the order of their names; seconds would not tell a quick resume from its start.
        unique = f"{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = self._records.RecordWriter((self._folder / f"events.out.tfevents.{unique}").open("wb"))
        self._write(file_version="brain.Event:2")
        # Makes TensorBoard forget the steps that a killed run had written beyond its last checkpoint.
        self._write(step=step, session_log=self._events.SessionLog(status=self._events.SessionLog.START))
        self._write(step=step, summary=self._parameters.hparams_pb(self._settings))

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


class WandbTracker:
    """Weights & Biases; WANDB_MODE, WANDB_ENTITY and the login are the user's environment's."""

    def __init__(self, project: str, run_dir: Path, flat_config: Mapping[str, Any]) -> None:
        self._wandb = wandb = _require("wandb", "trackers.wandb_project", "rlflow[wandb]")
        remembered = run_dir / "wandb_run_id"
        if not remembered.exists():
            remembered.write_text(uuid.uuid4().hex, encoding="ascii")
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                dir=str(run_dir),
                config=dict(flat_config),
                id=remembered.read_text(encoding="ascii"),
                resume="allow",
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trackers.wandb_project={project}: Weights & Biases does not start ({error}); log in with "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from error
        # The service counts its own steps upwards only; a resume that repeats steps needs ours on the axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for name in BEST:
            self._run.define_metric(name, step_metric="step", summary="max,last")

    def log(self, step: int, record: StepRecord) -> None:
        self._run.log({**_finite_only(record), "step": step})

    def alarm(self, text: str) -> None:
        self._run.alert(title=text.partition(":")[0], text=text)

    def samples(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        self._run.log({"samples": self._wandb.Table(columns=list(COLUMNS), data=list(rows)), "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow; MLFLOW_TRACKING_URI says where, by default mlflow.db in the run's folder, for `mlflow ui
    --backend-store-uri sqlite:///RUN/mlflow.db`. Its own thread sends the metrics: a slow server costs no step."""

    def __init__(self, experiment: str, run_dir: Path, flat_config: Mapping[str, Any]) -> None:
        self._mlflow = _require("mlflow", "trackers.mlflow_experiment", "rlflow[mlflow]")
        try:
            if "MLFLOW_TRACKING_URI" not in os.environ:
                self._mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
                os.environ.pop("MLFLOW_TRACKING_URI", None)  # which MLflow has set, also for the next run of a sweep
            self._mlflow.set_experiment(experiment)
            remembered = run_dir / "mlflow_run_id"
            if remembered.exists():
                run = self._mlflow.start_run(run_id=remembered.read_text(encoding="ascii"))
            else:
                run = self._mlflow.start_run(run_name=run_dir.name)
                remembered.write_text(run.info.run_id, encoding="ascii")
                # Once only: a parameter cannot be changed, and a resume may legitimately raise run.steps.
                self._mlflow.log_params(dict(flat_config))
        except self._mlflow.MlflowException as error:
            raise ConfigError(
                f"trackers.mlflow_experiment={experiment}: MLflow does not take the run ({error}); set "
                "MLFLOW_TRACKING_URI to the address of a tracking server that answers"
            ) from error
        self._best = {name: value for name, value in run.data.metrics.items() if name.endswith("/best")}

    def log(self, step: int, record: StepRecord) -> None:
        self._mlflow.log_metrics(_finite_only(record) | self._best_of(record), step=step, synchronous=False)

    def samples(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        # The run's description, which its page shows, because a table would need pandas and a store of files.
        lines = [f"- {name}: {json.dumps(text)}" for row in rows for name, text in zip(COLUMNS, row, strict=True)]
        self._mlflow.set_tag("mlflow.note.content", shorten("\n".join([f"Samples of step {step}", "", *lines]), NOTE))

    def _best_of(self, record: StepRecord) -> dict[str, float]:
        """The greatest values until now, by the metrics' names with /best."""
        now = {name: value for name, value in _finite_only(record).items() if name in BEST}
        self._best |= {f"{name}/best": max(value, self._best.get(f"{name}/best", value)) for name, value in now.items()}
        return {f"{name}/best": self._best[f"{name}/best"] for name in now}

    def alarm(self, text: str) -> None:
        self._mlflow.set_tag(f"alarm: {text.partition(' ')[0]}", text)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()


def _require(module: str, setting: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise _missing(error.name, setting, package) from error


def _missing(module: str, setting: str, package: str) -> ConfigError:
    return ConfigError(
        f"{setting} needs the package {module}, which is not installed; pip install '{package}', or leave the setting "
        "out"
    )


def _finite_only(record: StepRecord) -> dict[str, float | int]:
    numbers = {name: finite(value) for name, value in record.items()}
    return {name: value for name, value in numbers.items() if value is not None}
