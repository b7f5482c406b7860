"""Cross-checks of the teachers' settings. Whether a teacher fits the policy is `rlflow.workers.teachers`."""

from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from rlflow.algorithms.distillation import num_likely
from rlflow.config import Config, ModelPlacement
from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean
from rlflow.runtime.derived import DEFAULT_KIND, held_teachers, is_served, learns_from_rewards, served_teachers
from rlflow.runtime.kinds import name_for

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
    (
        "teacher.ranks",
        lambda c: not held_teachers(c),
        "on teachers behind URLs, which no process of the run holds; leave it at 1",
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


def check_teacher(config: Config) -> None:
    """Raise ConfigError for options in `teacher.args` that are wrong or without effect, for a URL that cannot be one of
    a teacher, and for what a server cannot compute."""
    served = served_teachers(config)
    unused = [name for name in ("model", "key_variable", "concurrency") if name in config.teacher.args]
    if unused and not served:
        raise ConfigError(f"teacher.args.{unused[0]} has no effect without a URL in teacher.models; leave it out")
    if num_likely(config.teacher) and config.rollout.top_k is not None:
        raise ConfigError(
            "rollout.top_k must be null with teacher.args.kl, which compares what policy and teacher say of all "
            f"tokens; got {config.rollout.top_k}"
        )
    for kind, url in config.teacher.models.items():
        if is_served(url):
            _check_url(f"teacher.models.{kind}", url)
    if not served:
        return
    if config.rollout.temperature != 1.0:
        raise ConfigError(
            "rollout.temperature must be 1 with a teacher behind a URL, which says how likely tokens are at that; got "
            f"{config.rollout.temperature:g}"
        )
    if config.rollout.top_k is not None:
        raise ConfigError(
            "rollout.top_k must be null with a teacher behind a URL, which says how likely a token is among all; got "
            f"{config.rollout.top_k}"
        )


def _check_url(setting: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(
            f"{setting} has a password in its URL, which the run's files would keep; put the key into an environment "
            "variable, and its name into teacher.args.key_variable"
        )
    if not parts.hostname or not parts.path.endswith("/v1") or parts.query or parts.fragment:
        raise ConfigError(f"{setting} must be a URL up to and including /v1, such as http://host:8000/v1; got {url!r}")


def check_kinds(config: Config, kinds: Collection[str]) -> None:
    """Raise ConfigError for a kind of task without a teacher, and for a teacher without tasks.

    `kinds` are those of all tasks.
    """
    models = config.teacher.models
    if not models:
        return
    named, known = models.keys() - {DEFAULT_KIND}, ", ".join(sorted(map(repr, kinds)))
    name_of = {kind: name_for(kind, named) for kind in kinds}
    missing = sorted(kind for kind, name in name_of.items() if name is None)
    if DEFAULT_KIND not in models and missing:
        raise ConfigError(
            f"teacher.models has no teacher for tasks of the kind {missing[0]!r}; it has {', '.join(sorted(named))}; "
            "add one, or one for `default`, which is for all other kinds"
        )
    if unused := sorted(named - set(name_of.values())):
        raise ConfigError(
            f"teacher.models.{unused[0]} has no effect, because no task is of that kind"
            f"{did_you_mean(unused[0], sorted(kinds))}; kinds of tasks are {known}; leave it out, or correct its name"
        )
    if DEFAULT_KIND in models and not missing:
        raise ConfigError(
            f"teacher.models.default has no effect, because each kind of task ({known}) has its own teacher; leave "
            "it out"
        )
