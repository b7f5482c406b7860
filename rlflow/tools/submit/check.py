"""What can be checked before a run is sent anywhere: its functions, its environment, and the files that it names."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rlflow.algorithms.registry import check_functions
from rlflow.config import Config
from rlflow.environments.find import held_out_tasks, load_environment
from rlflow.errors import ConfigError
from rlflow.rundir.directory import plain
from rlflow.runtime.derived import learns_from_rewards
from rlflow.tools.submit.command_words import CLAIM

_SECTIONS = ("model", "env", "reward", "teacher", "curriculum", "algorithm")
"""Sections whose settings may name files."""
_MODELS = ("model.path", "reward.model", "teacher.models")
"""Settings whose files are not read here."""
MAX_PATH = 1000


def check_run(config: Config, packaged: Collection[str], config_folder: Path | None = None) -> list[str]:
    """Raise ConfigError for what would end the run on the cluster; what could not be checked here, for a person.

    `packaged` are the files that go along to a Ray cluster, relative to the current directory. None go to Kubernetes.
    `config_folder` is what --config-dir names.
    """
    on_kubernetes = config.cluster.kubernetes.image is not None
    files = [("--config-dir", config_folder)] if config_folder else []
    files += _files(config)
    if not on_kubernetes:
        for key, path in files:
            is_here = not path.is_absolute() and path.exists()
            if is_here and not any(Path(each).is_relative_to(path) for each in packaged):
                raise ConfigError(
                    f"{key} names {path}, which does not go along with the job: it is outside of the working "
                    "directory, or .gitignore, .rayignore or rlflow leaves it out; move it, or give an absolute path "
                    "that the cluster sees"
                )
    away = [(key, path) for key, path in files if not path.exists() and (on_kubernetes or path.is_absolute())]
    unchecked = [f"{key}: the job looks for {Path(CLAIM, path)}" for key, path in (files if on_kubernetes else away)]
    if any(not key.startswith(_MODELS) for key, _ in away):
        return unchecked
    try:
        check_functions(config)
        spec = load_environment(config.env, config.reward, needs_reward=learns_from_rewards(config))
        if any(key.startswith("env.args") for key, _ in files):  # tasks that no file names may have to be downloaded
            spec.tasks()
            held_out_tasks(config, spec)
    except (ConfigError, ModuleNotFoundError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ModuleNotFoundError):
            cause = cause.__cause__
        if cause is None:
            raise
        # The machines of the cluster may well have it.
        unchecked.append(f"the environment and the functions: there is no module {cause.name!r} on this machine")
    return unchecked


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """(key, path) of each setting that names a file. A text that may be a mere name counts if such a file exists."""
    settings = plain(config)
    for section in _SECTIONS:
        for key, text in _texts(section, settings[section]):
            source, colon, _ = text.rpartition(":")
            is_code = bool(colon) and source.endswith(".py")
            path = Path(source if is_code else text)
            # Not the /no_think of a prompt.
            is_path = path.is_absolute() and len(path.parts) > 2 and " " not in text
            if is_path or is_code or (("/" in text or "." in text) and path.exists()):
                yield key, Path(*path.parts)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(key, item)
    elif isinstance(value, str) and len(value) < MAX_PATH and "\n" not in value:
        yield key, value
