"""rlflow as a library: `rlflow.train` for scripts and notebooks, `rlflow.open` for runs that are there.

keywords -> Config, and the objects that its texts stand for -> rlflow.run.train -> Run
Run.evaluate -> rlflow.tools.eval.evaluate -> Evaluated
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConfigError
from rlflow.plugins.given import GIVEN, given, is_given, text_for

if TYPE_CHECKING:
    from pandas import DataFrame

    from rlflow.telemetry.samples import StepSamples
    from rlflow.tools.eval.evaluate import Evaluated

Code = str | Callable[..., object]
"""A function or class as it is, or a name as on the command line: a shipped one, package.module:Name, file.py:Name."""
Rows = str | Path | Iterable[Mapping[str, Any]]
"""Rows as they are (a list of dicts, a `datasets.Dataset`), or a path or a name of the hub."""
_CURE = "load what is large, and make what cannot be pickled (locks, open files, connections), inside the code"


@dataclass(frozen=True)
class Run:
    """What a run has left in its directory, read anew at each look."""

    path: Path
    given: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """The code and rows that `train` was called with, which no file holds; empty for a run that was opened."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, oldest first; names as in metrics.jsonl, None where there was nothing to measure."""
        return self._records("metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One record an evaluation, oldest first; empty without `eval.every`."""
        return self._records("evaluations.jsonl")

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """What was wrong with the run and when, oldest first: the lines of alarms.jsonl."""
        return self._records("alarms.jsonl")

    @property
    def samples(self) -> list["StepSamples"]:
        """The best and the worst episode of each step that was looked at (`run.show_samples_every`)."""
        from rlflow.telemetry.samples import read_samples, sampled_steps

        return [read_samples(self.path, step) for step in sampled_steps(self.path)]

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint; None before the first."""
        from rlflow.rundir.store import CheckpointStore

        store = CheckpointStore(self.path / "checkpoints", keep=1)
        return store.path(store.steps()[-1]) if store.steps() else None

    def dataframe(self) -> "DataFrame":
        """`metrics` as a table of pandas, indexed by step. Raises ModuleNotFoundError without pandas."""
        from pandas import DataFrame

        return DataFrame(self.metrics).set_index("step")

    def evaluate(
        self,
        *,
        step: int | str | None = None,
        tasks: int | None = None,
        base: bool = False,
        reward: Code | Sequence[Code] | None = None,
        data: Rows | None = None,
        environment: Code | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> "Evaluated":
        """Measure a checkpoint as `rlflow eval` does, in a script or in a cell; every answer stays in the run's folder.

        step: of the checkpoint, or "best"; None is the newest.
        tasks: only the first so many.
        base: also the model that the run began with.
        reward, environment: in place of the run's, as `train` takes them. What a notebook or script had defined for
            the run is given again, unless this object came from `train`.
        data: the tasks to play, in place of those that the environment holds out; for one that takes rows.
        settings: over those of the run, by key, such as {"eval.episodes": 8, "env.name": "math500"}.

        Raises ConfigError before anything is started, RunError when nothing was scored, KeyboardInterrupt when it was
        interrupted; the answers so far are kept.
        """
        objects: dict[str, object] = {}
        chosen, emptied = _chosen_reward(reward, objects)
        if environment is not None:
            chosen["env.name"] = _code("environment", environment, objects)
        if data is not None:
            chosen["env.args.evaluation_path"] = _rows("data", data, objects)
            if "env.name" in {**chosen, **(settings or {})}:  # another environment, which needs tasks to train on too
                chosen["env.args.path"] = chosen["env.args.evaluation_path"]
        typed = _typed(settings, chosen)
        from rlflow.tools.eval.evaluate import evaluate_target  # imports Ray
        from rlflow.tools.target import target_of_run

        settings = {"eval.every": 1, **chosen, **typed}  # an evaluation is what happens, however often the run does it
        with _guest({**self.given, **objects}):
            target = target_of_run(self.path, None if step is None else str(step), settings, emptied=emptied)
            folder = Path(typed["run.dir"]) if "run.dir" in typed else None
            return evaluate_target(target, folder=folder, base=base, num_tasks=tasks)

    def _records(self, name: str) -> list[dict[str, Any]]:
        from rlflow.telemetry.metrics import read

        return read(self.path / name) if (self.path / name).is_file() else []


def open(path: str | Path) -> Run:
    """A run that is there: finished, stopped or going on. Raises ConfigError when `path` is no run's directory."""
    if not (Path(path) / "config.yaml").is_file():
        raise ConfigError(f"{path} is not a run's directory; give the run.dir of a run, such as runs/NAME-TIME")
    return Run(Path(path).absolute())


def train(
    *,
    model: str | Path | None = None,
    reward: Code | Sequence[Code] | None = None,
    data: Rows | None = None,
    evaluation_data: Rows | None = None,
    environment: Code | None = None,
    recipe: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Train as `rlflow train` does, in a script or in a cell of a notebook; returns when the run has ended.

    model: a folder, a hub id or a name (`model.path`).
    reward: what scores an episode, in any shape that docs/rewards.md shows (`reward.function`); or several.
    data, evaluation_data: the tasks, as `envs/dataset` reads them, and those that `eval.every` plays.
    environment: a class, a function that returns an EnvironmentSpec, or a name (`env.name`). A class without tasks of
        its own plays those of `data`.
    recipe: where the settings come from that are not given; None is the defaults of rlflow.config.
    settings: every other setting by its key on the command line, such as {"run.steps": 20, "algorithm.loss": "gspo"}.

    What a notebook or script defines is sent to the processes that run it. To go on with a run, call this again with
    its `run.dir` and the same code and rows. Ctrl-C, or the notebook's interrupt, ends the run after its step, saved,
    and this returns. A second one leaves at once: it ends a script, and is a KeyboardInterrupt in a notebook.

    Raises ConfigError (a ValueError) before anything is started, RunError when the run cannot go on.
    """
    objects: dict[str, object] = {}
    chosen, emptied = _chosen_reward(reward, objects)
    if model is not None:
        chosen["model.path"] = str(model)
    if data is not None or environment is not None:
        chosen["env.name"] = "dataset" if environment is None else _code("environment", environment, objects)
        emptied.append("env.args")
    for argument, keyword, rows in (("path", "data", data), ("evaluation_path", "evaluation_data", evaluation_data)):
        if rows is not None:
            chosen[f"env.args.{argument}"] = _rows(keyword, rows, objects)
    typed = _typed(settings, chosen)
    from rlflow.settings.compose import compose

    config = compose({**chosen, **typed}, recipe=recipe, emptied=emptied)
    from rlflow.run import train as run  # imports Ray

    with _guest(objects):
        return Run(run(config)[0], objects)


@contextmanager
def _guest(objects: Mapping[str, object]) -> Iterator[None]:
    """The block finds the objects; after it, signals and streams are the caller's again."""
    from rlflow.runtime.signals import handlers_kept
    from rlflow.runtime.streams import make_dispensable

    with given(objects), handlers_kept(), redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
        if sys.stdout is sys.__stdout__:  # not that of a notebook
            make_dispensable()
        yield


def _typed(settings: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as values that a file could hold. Raises ConfigError for code, and for a key that a keyword has."""
    typed = {key: str(value) if isinstance(value, Path) else value for key, value in (settings or {}).items()}
    for key, value in typed.items():
        if callable(value):
            raise ConfigError(f"settings[{key!r}] must be a value such as text; give code as `reward` or `environment`")
    if keywords := sorted(typed.keys() & (chosen.keys() | {"recipe"}) - {"reward.weights"}):
        raise ConfigError(f"settings[{keywords[0]!r}] is a keyword of this call; give it there alone")
    return typed


def _chosen_reward(
    reward: Code | Sequence[Code] | None, objects: dict[str, object]
) -> tuple[dict[str, Any], list[str]]:
    """The settings for `reward`, and the mappings that lose what was said about another one."""
    if reward is None:
        return {}, []
    rewards = [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward
    names = [_code("reward", each, objects) for each in rewards]
    return {"reward.function": names if rewards is reward else names[0], "reward.weights": None}, ["reward.args"]


def _code(keyword: str, code: Code, objects: dict[str, object]) -> str:
    """The text for a function or class in the settings; what only this process has goes to `objects`."""
    if isinstance(code, str):
        return code
    if not callable(code):
        raise ConfigError(f"{keyword} must be code or a name; got {code!r:.80}")
    text = text_for(code)
    if is_given(text):
        from rlflow.processes.pool import payload_of

        payload_of(code, f"{keyword}={text.partition(':')[2]}", "its process", _CURE)
        if objects.setdefault(text, code) is not code:
            raise ConfigError(f"{keyword}: two functions have the name {text.partition(':')[2]!r}; rename one")
    return text


def _rows(keyword: str, rows: Rows, objects: dict[str, object]) -> str:
    """The path in the settings; rows go to `objects`."""
    if isinstance(rows, str | Path):
        return str(rows)
    copied = list(rows)
    if wrong := [index for index, row in enumerate(copied) if not isinstance(row, Mapping)]:
        raise ConfigError(
            f"{keyword} must be dicts such as {{'prompt': .., 'answer': ..}}, or the path of a file; row {wrong[0]} is "
            f"{copied[wrong[0]]!r:.80} (a DataFrame: give frame.to_dict('records'))"
        )
    objects[text := f"{GIVEN}:{keyword}, {len(copied)} rows"] = copied
    return text
