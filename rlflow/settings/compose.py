"""Command line or keywords, and recipe -> Hydra -> a checked Config -> what the verb or the caller does with it.

`train` reads a command line, `compose` what `rlflow.train` was called with. An error of Hydra, OmegaConf or YAML
becomes a ConfigError with one sentence that a person can act on (`explain`).
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlflow.config import Config, RewardConfig
from rlflow.errors import ConfigError, RunError
from rlflow.settings.checks import check
from rlflow.settings.explain import explain, leaf_keys, unknown_key
from rlflow.settings.recipe_files import recipe_names

Report = Callable[[ConfigError | RunError], int]
"""Shows an error to the person and says which exit code it means."""
Run = Callable[[Config], int]
"""Does what a checked configuration asks for and says which exit code that means."""

Objective = Callable[[Config], float | None]
"""What a sweep is to make large or small, of a job that has ended; None when it has no such figure."""

_MAX_NAME = 200
"""Characters of a folder's name; file systems take 255 bytes."""
_GROUPS = ("algorithm", "cluster")
"""Sections whose name also chooses a file of settings: cluster=ray."""
FREE_KEYS = tuple(key for key, kind in leaf_keys().items() if kind in (dict[str, Any], dict[str, str]))
"""Below these a key is an argument of something that the user chose, or a word of theirs."""

_OPTIONS = (
    *("help", "hydra_help", "version", "cfg", "resolve", "package", "run", "multirun", "shell_completion"),
    *("config_path", "config_name", "config_dir", "info"),
)
"""Hydra's, which may be cut short."""


def train(
    arguments: Sequence[str],
    report: Report,
    run: Run,
    objective: Objective = lambda config: None,
    *,
    needs_recipe: bool = True,
) -> int:
    """Run `rlflow train ARGUMENTS`; the largest exit code of its jobs (one, or several with --multirun).

    Raises ConfigError when nothing can be composed. What a single job raises goes to `report`, so that the other jobs
    of a sweep still run. A job of a sweep has a run.dir of its own below hydra.sweep.dir, named by what is swept over,
    unless one was given; Hydra's sweeper gets its objective, or None when it failed.
    """
    if any(argument.startswith("--ex") for argument in arguments):
        raise ConfigError(
            "--experimental-rerun is not supported: it would run a pickle file; to go on with a run, give run.dir"
        )
    for word in arguments:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and not any(each.startswith(name) for each in _OPTIONS):
            told = "it is a setting" if name in leaf_keys() else unknown_key(name)
            raise ConfigError(f"write {word} as key=value: {told}")
    exit_codes: list[int] = []
    folders: set[str | None] = set()

    def job(composed: DictConfig) -> float | None:
        try:
            if needs_recipe and HydraConfig.get().runtime.choices.get("recipe", "") is None:
                raise ConfigError(f"no recipe given; add recipe=<name> with one of: {', '.join(recipe_names())}")
            config = to_config(composed)
            is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
            if is_sweep and config.run.dir is None:
                config.run.dir = _folder_in_sweep(overrides, folders)
            folder = config.run.dir
            if folder is not None and folder in folders:
                raise ConfigError(
                    f"run.dir={folder} is used by two jobs of this sweep; leave it out, and each gets its own, or give "
                    f"each its own, such as 'run.dir={folder}/${{hydra:job.num}}'"
                )
            folders.add(folder)
            exit_codes.append(run(config))
            return objective(config) if is_sweep else None
        except (ConfigError, RunError) as error:
            exit_codes.append(report(error))
            return None

    ConfigStore.instance().store(name="schema", node=Config)
    overrides = [each for each in arguments if "=" in each and not each.startswith("-")]
    options = [each for each in arguments if each not in overrides]
    # Hydra takes key=value on one side of the options only; below FREE_KEYS a key may be new.
    overrides = [f"++{each}" if _is_free(each.partition("=")[0]) else each for each in overrides]
    typed, sys.argv = sys.argv, ["rlflow", *options, *overrides]  # where Hydra looks for them
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them and exiting
    try:
        hydra.main(version_base="1.3", config_path="pkg://rlflow.recipes", config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error, [each.partition("=")[0].lstrip("+~") for each in overrides])) from error
    finally:
        sys.argv = typed
    return max(exit_codes, default=0)


def _folder_in_sweep(overrides: Sequence[str], taken: Collection[str | None]) -> str:
    """Where the job of a sweep that runs now keeps its files: sweep.dir/run.seed=1_trainer.learning_rate=0.001."""
    job = HydraConfig.get()
    fixed = {
        each.get_key_element()
        for each in OverridesParser.create().parse_overrides(list(overrides))
        if not each.is_sweep_override()
    }
    swept = [word.lstrip("+") for word in job.overrides.task if word.partition("=")[0] not in fixed]
    name = "_".join(swept).replace("/", "_")[:_MAX_NAME] or str(job.job.num)
    folder = f"{job.runtime.output_dir}/{name}"
    return f"{folder}_{job.job.num}" if folder in taken else folder  # a sweeper may try the same values again


def compose(settings: Mapping[str, object], *, recipe: str | None = None, emptied: Collection[str] = ()) -> Config:
    """What `rlflow train recipe=RECIPE KEY=VALUE ..` composes, with values of Python in place of text.

    `emptied` are mappings, such as env.args, that lose what the recipe says. A Hydra that the program uses itself is
    left as it is. Raises ConfigError.
    """
    chosen = {key: value for key, value in settings.items() if key in _GROUPS and isinstance(value, str)}
    files = [f"{group}={name}" for group, name in chosen.items()] + ([f"recipe={recipe}"] if recipe else [])
    try:
        with _own_hydra(), hydra.initialize_config_module("rlflow.recipes", version_base="1.3"):
            composed = hydra.compose("config", [*files, f"run.name={recipe or 'run'}"])
        for key in emptied:
            OmegaConf.update(composed, key, {}, merge=False, force_add=True)
        for key, value in settings.items():
            if key not in chosen:
                OmegaConf.update(composed, key, value, merge=True, force_add=_is_free(key))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error)) from error
    return to_config(composed)


def composed_config(words: Sequence[str]) -> Config:
    """The settings that `words` (key=value, groups too) make of the defaults. Raises ConfigError."""
    found: list[Config] = []

    def report(error: ConfigError | RunError) -> int:
        raise error

    def take(config: Config) -> int:
        found.append(config)
        return 0

    train(words, report, take, needs_recipe=False)
    return found[0]


def config_of_run(
    run: Path, settings: Sequence[str] | Mapping[str, object], *, emptied: Collection[str] = ()
) -> Config:
    """The settings that a run was last started with, and others over them: words (key=value), or values by key.

    With another env.name, the arguments and the reward of the run's own environment are left out. `emptied` as in
    `compose`. Raises ConfigError.
    """
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run / "config.yaml"))
        assert isinstance(composed, DictConfig)
        if not isinstance(settings, Mapping):
            parsed = OverridesParser.create().parse_overrides(list(settings))
            settings = {each.key_or_group: each.value() for each in parsed}
        if settings.get("env.name", composed.env.name) != composed.env.name:
            OmegaConf.update(composed, "env.args", {}, merge=False)
            OmegaConf.update(composed, "reward", RewardConfig(), merge=False)
        for key in emptied:
            OmegaConf.update(composed, key, {}, merge=False)
        for key, value in settings.items():
            OmegaConf.update(composed, key, value, merge=True, force_add=_is_free(key))
    except OSError as error:
        raise ConfigError(
            f"{run / 'config.yaml'}, the settings of the run, cannot be read: {error.strerror}"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error)) from error
    return to_config(composed)


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra keeps what it does in singletons; those of the program around us come back after the block."""
    singletons, schemas = Singleton._instances, ConfigStore.instance().repo
    their_singletons, their_schemas = dict(singletons), dict(schemas)
    for kind in (GlobalHydra, VersionBase):
        singletons.pop(kind, None)
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        yield
    finally:
        singletons.clear()
        singletons.update(their_singletons)
        schemas.clear()
        schemas.update(their_schemas)


def to_config(composed: DictConfig) -> Config:
    """The dataclasses behind a composed configuration, checked. Raises ConfigError."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    settings = leaf_keys()
    sections = {key.rpartition(".")[0] for key in settings}
    pending: list[tuple[str, DictConfig]] = [("", composed)]
    while pending:  # a key that `+key=value` added has no effect, and Hydra lets it through
        prefix, section = pending.pop()
        for name, value in section.items_ex(resolve=False):
            key = f"{prefix}{name}"
            if key in sections:
                pending.append((f"{key}.", value))
            elif key not in settings:
                raise ConfigError(unknown_key(key))
    check(config)
    return config


def _is_free(key: str) -> bool:
    return key in FREE_KEYS or key.startswith(tuple(f"{free}." for free in FREE_KEYS))
