"""The directory of a run: who may write it, and whether it is begun, resumed or set aside."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from rlflow.config import Config, OnExists
from rlflow.errors import ConfigError, RunError, first_line
from rlflow.rundir.lock import NAME, hold
from rlflow.rundir.store import CheckpointStore, RunState
from rlflow.runtime.disk import disk_errors, sync

FAILURE = "failure.txt"
"""In the directory of a run that has failed: why."""
_FIXED = (
    "model.path",
    "lora.rank",
    "lora.alpha",
    "lora.rank_stabilised",
    "lora.targets",
    "env.name",
    "env.args",
    "curriculum.kind",
    "run.seed",
    "algorithm.groups_per_step",
)
"""Settings that a resumed run must share with its beginning: they decide its weights, its tasks, their order and how
many a step uses."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunDir:
    """A directory that this process may write, exclusively."""

    path: Path
    checkpoints: CheckpointStore
    resume_from: Path | None
    """The checkpoint to go on from; None begins at step 0."""
    state: RunState | None = None
    """What that checkpoint says."""
    alarms: tuple[str, ...] = ()
    """What a person must know: one for each newer checkpoint, which was damaged."""

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def health(self) -> Path:
        return self.path / "alarms.jsonl"


@contextmanager
def claim(config: Config) -> Iterator[RunDir]:
    """Prepare `run.dir` as `run.on_exists` says and hold its lock.

    Raises ConfigError when another process writes the directory, when it holds a run that must not be touched, or when
    it cannot be resumed with these settings; RunError when none of its checkpoints is whole.
    """
    path = Path(config.run.dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir {path} cannot be made: {error.strerror}; choose another run.dir") from error
    with hold(path):
        checkpoints = CheckpointStore(path / "checkpoints", config.run.keep_checkpoints)
        begun = (path / "config.yaml").exists()
        if begun and config.run.on_exists is OnExists.fail:
            raise ConfigError(
                f"run.dir {path} already holds a run and run.on_exists is fail; choose another run.dir, or "
                f"run.on_exists=resume"
            )
        if begun and config.run.on_exists is OnExists.fresh:
            number = 1
            while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
                number += 1
            aside.mkdir()
            for entry in list(path.iterdir()):
                if entry.name != NAME:
                    entry.rename(aside / entry.name)
        if checkpoints.steps():
            _check_same_run(config, path)
            print(f"reading the newest checkpoint in {checkpoints.folder} to check it ...", flush=True)
        run_dir = rewound(RunDir(path=path, checkpoints=checkpoints, resume_from=None))
        for alarm in run_dir.alarms:  # at once: whatever fails next, the folder has its new name
            print(f"ALARM: {alarm}", flush=True)
        with disk_errors("the run", path):
            partial = path / "config.yaml.partial"
            partial.write_text(yaml.safe_dump(plain(config), sort_keys=False))
            sync(partial)
            partial.rename(path / "config.yaml")
        failure = path / FAILURE
        failure.unlink(missing_ok=True)
        try:
            yield run_dir
        except RunError as error:
            with suppress(OSError):  # a full disk may be why it failed
                failure.write_text(f"{error}\n")
            raise


def rewound(run_dir: RunDir) -> RunDir:
    """The directory, made ready to resume from the newest whole checkpoint, or to begin anew if there is none at all.

    The ledger becomes that of the checkpoint; what came after it is played again. Raises RunError when none is whole.
    """
    with disk_errors("the run", run_dir.path):
        found = run_dir.checkpoints.newest_whole()
        for left_over in run_dir.path.glob("ledger.db*"):
            left_over.unlink()
        if found is None:
            return replace(run_dir, resume_from=None, state=None, alarms=())
        shutil.copyfile(found.folder / "ledger.db", run_dir.ledger)
    return replace(run_dir, resume_from=found.folder, state=found.state, alarms=found.alarms)


def _check_same_run(config: Config, path: Path) -> None:
    try:
        before: dict[str, Any] = yaml.safe_load((path / "config.yaml").read_text())
        # A section may be newer than the run.
        begun = [before.get(key.split(".")[0], {}).get(key.split(".")[1], attrgetter(key)(Config())) for key in _FIXED]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(
            f"{path / 'config.yaml'}, with which the run was begun, cannot be read ({first_line(error)}); bring it "
            "back from a copy, or begin anew with run.on_exists=fresh or another run.dir"
        ) from error
    now = plain(config)
    for key, first in zip(_FIXED, begun, strict=True):
        section, name = key.split(".")
        if first != now[section][name]:
            raise ConfigError(
                f"{key} is {attrgetter(key)(config)!r}, but the run in {path} was begun with {first!r}; give it "
                "the same value to resume, choose another run.dir, or set run.on_exists=fresh"
            )


def plain(config: Config) -> dict[str, Any]:
    """The settings as plain dicts and values, as YAML and trackers take them."""
    return TypeAdapter(Config).dump_python(config, mode="json", warnings=False)


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys, as trackers take them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
