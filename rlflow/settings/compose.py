"""`rlflow train`: command line and recipe -> Hydra -> Config -> rlflow.run, with errors that a person can act on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlflow.config import Config
from rlflow.errors import ConfigError, RunError
from rlflow.settings.checks import check
from rlflow.settings.explain import explain, leaf_keys, unknown_key
from rlflow.settings.recipe_files import recipe_names

Report = Callable[[ConfigError | RunError], int]
"""Shows an error to the person and says which exit code it means."""
Run = Callable[[Config], int]
"""Does what a checked configuration asks for and says which exit code that means."""


FREE_KEYS = (
    "env.args.",
    "reward.args.",
    "curriculum.args.",
    "algorithm.advantage_args.",
    "algorithm.loss_args.",
    "algorithm.corrections.",
)
"""Below these a key is an argument of something that the user chose."""


def train(arguments: Sequence[str], report: Report, run: Run, *, needs_recipe: bool = True) -> int:
    """Run `rlflow train ARGUMENTS`; the largest exit code of its jobs (one, or several with --multirun).

    Raises ConfigError when nothing can be composed. What a single job raises goes to `report`, so that the other jobs
    of a sweep still run.
    """
    if any(argument.startswith("--ex") for argument in arguments):
        raise ConfigError(
            "--experimental-rerun is not supported: it would run a pickle file; to go on with a run, give run.dir"
        )
    exit_codes: list[int] = []
    folders: set[str] = set()

    def job(composed: DictConfig) -> None:
        try:
            exit_codes.append(_train_one(composed, folders, run, needs_recipe=needs_recipe))
        except (ConfigError, RunError) as error:
            exit_codes.append(report(error))

    ConfigStore.instance().store(name="schema", node=Config)
    typed, sys.argv = sys.argv, ["rlflow", *_arguments_for_hydra(arguments)]  # where Hydra looks for them
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them and exiting
    try:
        hydra.main(version_base="1.3", config_path="pkg://rlflow.recipes", config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error)) from error
    finally:
        sys.argv = typed
    return max(exit_codes, default=0)


def to_config(composed: DictConfig) -> Config:
    """The dataclasses behind a composed configuration, checked. Raises ConfigError."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    _refuse_added_keys(composed)
    check(config)
    return config


def _refuse_added_keys(composed: DictConfig) -> None:
    """A key that `+key=value` added has no effect, and Hydra lets it through."""
    settings = leaf_keys()
    sections = {key.rpartition(".")[0] for key in settings}
    pending: list[tuple[str, DictConfig]] = [("", composed)]
    while pending:
        prefix, section = pending.pop()
        for name, value in section.items_ex(resolve=False):
            key = f"{prefix}{name}"
            if key in sections:
                pending.append((f"{key}.", value))
            elif key not in settings:
                raise ConfigError(unknown_key(key))


def _train_one(composed: DictConfig, folders: set[str], run: Run, *, needs_recipe: bool) -> int:
    if needs_recipe and HydraConfig.get().runtime.choices.get("recipe", "") is None:
        raise ConfigError(f"no recipe given; add recipe=<name> with one of: {', '.join(recipe_names())}")
    config = to_config(composed)
    if config.run.dir is not None:
        if config.run.dir in folders:
            raise ConfigError(
                f"run.dir={config.run.dir} is used by two jobs of this sweep; give each its own, such as "
                f"'run.dir={config.run.dir}/${{hydra:job.num}}'"
            )
        folders.add(config.run.dir)
    return run(config)


def _arguments_for_hydra(arguments: Sequence[str]) -> list[str]:
    """Options first, because Hydra takes key=value on one side of them only; and what is below FREE_KEYS may be new."""
    overrides = [each for each in arguments if "=" in each and not each.startswith("-")]
    options = [each for each in arguments if each not in overrides]
    return [*options, *(f"++{each}" if each.startswith(FREE_KEYS) else each for each in overrides)]
