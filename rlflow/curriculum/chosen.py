"""The curriculum of a run, from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from rlflow.algorithms.names import bind
from rlflow.config import CurriculumConfig
from rlflow.curriculum.balanced import Balanced
from rlflow.curriculum.base import Curriculum
from rlflow.curriculum.difficulty import Difficulty
from rlflow.curriculum.uniform import Uniform
from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object
from rlflow.types import Task

SHIPPED: dict[str, Callable[..., Curriculum]] = {"uniform": Uniform, "difficulty": Difficulty, "balanced": Balanced}
WITHOUT_OPTIONS = ("uniform", "balanced")


def check_curriculum(config: CurriculumConfig) -> None:
    """What can be known without the tasks and without loading a user's class. Raises ConfigError."""
    if config.kind not in SHIPPED and ":" not in config.kind:
        close = get_close_matches(config.kind, SHIPPED, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"curriculum.kind={config.kind} is not a curriculum; {hint}There are {', '.join(SHIPPED)}; your own class "
            "is package.module:Class or file.py:Class"
        )
    if config.args and config.kind in WITHOUT_OPTIONS:
        raise ConfigError(
            f"curriculum.args={config.args} has no effect with curriculum.kind={config.kind}, which has no options; "
            "leave it empty"
        )


def make_curriculum(config: CurriculumConfig, tasks: Sequence[Task], seed: int) -> Curriculum:
    """Raises ConfigError for a class that is missing or no curriculum, and for options that it does not take."""
    check_curriculum(config)
    if config.kind in SHIPPED:
        return bind(SHIPPED[config.kind], config.args, "curriculum.args")(tasks, seed)
    try:
        found = load_object(config.kind)
    except ConfigError as error:
        raise ConfigError(f"curriculum.kind: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Curriculum):
        raise ConfigError(
            f"curriculum.kind={config.kind} must be a class below rlflow.curriculum.base.Curriculum; got {found!r:.80}"
        )
    make: Callable[..., Curriculum] = bind(found, config.args, "curriculum.args")
    try:
        return make(tasks, seed)
    except TypeError as error:
        raise ConfigError(
            f"curriculum.kind={config.kind} cannot be built as Class(tasks, seed, **curriculum.args): {error}"
        ) from error
