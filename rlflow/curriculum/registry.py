"""The curriculum of a run, from its settings."""

from collections.abc import Callable, Sequence

from rlflow.config import CurriculumConfig
from rlflow.curriculum.base import Curriculum
from rlflow.errors import ConfigError
from rlflow.plugins.catalog import Catalog, modules_of
from rlflow.plugins.options import bind
from rlflow.types import Task

CURRICULA = Catalog(
    setting="curriculum.kind",
    what="a curriculum",
    shipped=modules_of("rlflow.curriculum", str.title),
    group="rlflow.curricula",
)


def check_curriculum(config: CurriculumConfig) -> None:
    """Raise ConfigError for what can be known without the tasks and without code from outside rlflow."""
    CURRICULA.path_of(config.kind)
    if config.kind in CURRICULA.shipped:
        _bound(config)


def make_curriculum(config: CurriculumConfig, tasks: Sequence[Task], seed: int) -> Curriculum:
    """Raises ConfigError for a class that is missing or no curriculum, and for options that it does not take."""
    try:
        return _bound(config)(tasks, seed)
    except TypeError as error:
        raise ConfigError(
            f"curriculum.kind={config.kind} cannot be built as Class(tasks, seed, **curriculum.args): {error}"
        ) from error


def _bound(config: CurriculumConfig) -> Callable[..., Curriculum]:
    found = CURRICULA.find(config.kind)
    if not isinstance(found, type) or not issubclass(found, Curriculum):
        raise ConfigError(
            f"curriculum.kind={config.kind} must be a class below rlflow.curriculum.base.Curriculum; got {found!r:.80}"
        )
    return bind(found, config.args, "curriculum.args", f"curriculum.kind={config.kind}")
