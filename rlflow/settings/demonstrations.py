"""Whether the tasks of a run and its settings agree on who gives the replies: the engines, or the data."""

from collections.abc import Sequence

from rlflow.algorithms.distillation import num_likely
from rlflow.algorithms.registry import Kind, advantage_of, needs_critic, resolve
from rlflow.algorithms.schedules import share_power
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.types import Task


def check_demonstrations(config: Config, tasks: Sequence[Task]) -> None:
    """Raise ConfigError where replies are neither given nor sampled, or are given to an algorithm that compares them
    with what a policy would have sampled."""
    count = sum(bool(task.demonstrations) for task in tasks)
    if not count:
        if not config.rollout.engines:
            raise ConfigError(
                "rollout.engines=0 leaves nobody to reply; raise it, or give the replies with env.name=demonstrations"
            )
        return
    if count < len(tasks):
        raise ConfigError(
            f"{count} of {len(tasks)} tasks have a demonstration; a run either learns from all of them or plays all"
        )
    _check_algorithm(config, {len(task.demonstrations) for task in tasks})
    if config.eval.every and not config.rollout.engines:
        raise ConfigError("eval.every needs an engine that replies; set rollout.engines=1, or eval.every=0")


def _check_algorithm(config: Config, numbers: set[int]) -> None:
    """`numbers` of demonstrations that tasks have."""
    algorithm = config.algorithm
    if numbers != {algorithm.group_size}:
        raise ConfigError(
            "algorithm.group_size must be the number of demonstrations that each task has, 1 for a reply and 2 for a "
            f"pair; got {algorithm.group_size}, and tasks with {' and '.join(map(str, sorted(numbers)))}"
        )
    traits = advantage_of(algorithm).traits
    if needs_critic(algorithm) or traits.needs_greedy:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} judges what a policy sampled; with demonstrations take reward"
        )
    if algorithm.group_size > 1 and not traits.needs_log_ratios:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} would push rejected replies away without bound; for pairs "
            "take dpo or ipo"
        )
    if not resolve(Kind.loss, algorithm.loss).traits.has_no_ratio:
        raise ConfigError(
            f"algorithm.loss={algorithm.loss} compares with the policy that sampled, and nobody has sampled "
            "demonstrations; take reinforce, which with algorithm.advantage=reward is their negative log-probability"
        )
    if share_power(config.trainer) > 0:
        raise ConfigError(
            "trainer.schedule_args.effective_share has no effect with demonstrations, which nobody has sampled; leave "
            "it out"
        )
    for name in ("oversample", "oversample_episodes"):
        if (value := getattr(config.rollout, name)) > 1:
            raise ConfigError(f"rollout.{name} must be 1 with demonstrations, all of which are shown; got {value}")
    # A teacher that names likely tokens needs nobody's log-probabilities.
    judges = config.teacher.models and not num_likely(config.teacher)
    needing = {"teacher.args.kl=sampled": judges, "algorithm.corrections": algorithm.corrections}
    for name in (name for name, value in needing.items() if value):
        raise ConfigError(
            f"{name} needs the log-probabilities of the policy that sampled, which demonstrations do not "
            f"have; {'set it to reverse or forward' if name.startswith('teacher') else 'leave it out'}"
        )
