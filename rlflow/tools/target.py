"""What a person means by RUN|CHECKPOINT|MODEL: settings, and a folder that vLLM loads."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_model
from rlflow.rundir.store import CheckpointStore
from rlflow.runtime.derived import dtype_of
from rlflow.settings.compose import composed_config, config_of_run
from rlflow.tools.export import export


@dataclass(kw_only=True, slots=True, frozen=True)
class Target:
    name: str
    """What people are told."""
    config: Config
    run: Path | None = None
    step: str | None = None
    """The step of the run's checkpoint; None without a run."""

    @contextmanager
    def model(self, folder: Path) -> Iterator[str]:
        """The path of the model, as `model.path` takes it. A checkpoint is written below `folder` for the block."""
        if self.run is None:
            yield resolve_model(self.config.model.path)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as scratch:
            dtype = dtype_of(self.config).value
            yield str(export(self.run, Path(scratch) / "model", step=self.step, dtype=dtype))


def find_target(word: str, step: str | None, words: Sequence[str]) -> Target:
    """`word` is a run's directory, the folder of one of its checkpoints, or a model: a folder, a hub id or built in.

    `step` is a number, `best`, or None for a run's last checkpoint. The settings are those of the run with `words` over
    them, for a model `words` alone. Raises ConfigError.
    """
    path = Path(word).expanduser()
    if path.resolve().parent.name == "checkpoints" and (path / "state.json").is_file():
        if step is not None:
            raise ConfigError(f"--step has no effect on {word}, which is a checkpoint; leave it out")
        run, step = path.resolve().parents[1], path.resolve().name.removeprefix("step_")
    elif (path / "checkpoints").is_dir():
        run = path
    else:
        if step is not None:
            raise ConfigError(f"--step has no effect on {word}, which is not a run's directory; leave it out")
        quoted = "'" + word.replace("'", "\\'") + "'"
        return Target(name=word, config=composed_config(["run.name=run", *words, f"model.path={quoted}"]))
    return target_of_run(run, step, words)


def target_of_run(
    run: Path, step: str | None, settings: Sequence[str] | Mapping[str, object], *, emptied: Collection[str] = ()
) -> Target:
    """A checkpoint of the run; `step` as in `find_target`, the rest as in `config_of_run`. Raises ConfigError."""
    step = CheckpointStore(run / "checkpoints", keep=1).chosen(run, step).name.removeprefix("step_")
    config = config_of_run(run, settings, emptied=emptied)
    return Target(name=f"{run.name} step {step}", config=config, run=run, step=step)
