"""Cross-checks of the teachers' settings. Whether a teacher fits the policy is `rlflow.workers.teachers`."""

from collections.abc import Callable, Collection

from rlflow.config import Config, ModelPlacement
from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean
from rlflow.runtime.derived import DEFAULT_KIND, learns_from_rewards

WITHOUT_EFFECT: list[tuple[str, Callable[[Config], object], str]] = [
    *(
        (f"teacher.{name}", lambda c: not c.teacher.models, "without a teacher; name one in teacher.models")
        for name in ("weight", "reward_weight", "ranks", "args")
    ),
    (
        "teacher.ranks",
        lambda c: c.cluster.roles is ModelPlacement.shared,
        "with cluster.roles=shared, which puts one on each GPU of the trainer; leave it at 1",
    ),
    *(
        (
            f"algorithm.{name}",
            lambda c: not learns_from_rewards(c),
            "with teacher.reward_weight=0, where nothing is learnt from rewards; leave it out, or raise the weight",
        )
        for name in ("advantage", "advantage_args", "dynamic_sampling", "overlong_tokens")
    ),
]
"""As in `checks`."""


def check_kinds(config: Config, kinds: Collection[str]) -> None:
    """Raise ConfigError for a kind of task without a teacher, and for a teacher without tasks.

    `kinds` are those of all tasks.
    """
    models = config.teacher.models
    if not models:
        return
    named, known = models.keys() - {DEFAULT_KIND}, ", ".join(sorted(map(repr, kinds)))
    if DEFAULT_KIND not in models and (missing := sorted(set(kinds) - named)):
        raise ConfigError(
            f"teacher.models has no teacher for tasks of the kind {missing[0]!r}; it has {', '.join(sorted(named))}; "
            "add one, or one for `default`, which is for all other kinds"
        )
    if unused := sorted(named - set(kinds)):
        raise ConfigError(
            f"teacher.models.{unused[0]} has no effect, because no task is of that kind"
            f"{did_you_mean(unused[0], sorted(kinds))}; kinds of tasks are {known}; leave it out, or correct its name"
        )
    if DEFAULT_KIND in models and named == set(kinds):
        raise ConfigError(
            f"teacher.models.default has no effect, because each kind of task ({known}) has its own teacher; leave "
            "it out"
        )
