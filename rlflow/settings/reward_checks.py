"""Cross-checks of the rewards' settings. Whether a function can be called is `rlflow.rewards.choose`."""

import math
from collections.abc import Callable

from rlflow.config import Config, ModelPlacement
from rlflow.errors import ConfigError
from rlflow.rewards.models import calls_functions, chosen_models, is_model_alone

WITHOUT_EFFECT: list[tuple[str, Callable[[Config], object], str]] = [
    (
        "reward.model_replicas",
        lambda c: c.reward.model is None,
        "without reward.model; give one, or set reward.workers for more processes that call a function",
    ),
    ("reward.weights", lambda c: is_model_alone(c.reward), "with reward.model alone; leave it out"),
    (
        "reward.workers",
        lambda c: not calls_functions(c.reward),
        "with reward.model; set it to 1, and reward.model_replicas for more processes",
    ),
]
"""As in `checks`."""


def check_reward(config: Config) -> None:
    """Raise ConfigError for weights that are wrong, and for reward models that cannot be as they are asked for."""
    reward, ranks = config.reward, config.trainer.ranks
    if reward.model is not None:
        chosen_models(reward)
    if reward.model is not None and reward.function is not None and reward.weights is None:
        raise ConfigError(  # a recipe may name a function that was meant to be replaced
            f"reward.function={reward.function} and reward.model={reward.model} both score; say in reward.weights how "
            "they count together, functions first, or set reward.function=null"
        )
    if reward.weights is not None and not all(math.isfinite(weight) for weight in reward.weights):
        raise ConfigError(f"reward.weights must be finite numbers; got {reward.weights}")
    if reward.weights is not None and not any(reward.weights):
        raise ConfigError(f"reward.weights must not all be 0, because then there is no reward; got {reward.weights}")
    if reward.model is not None and config.cluster.roles is ModelPlacement.shared and reward.model_replicas > ranks:
        raise ConfigError(
            "cluster.roles=shared puts each replica of the reward model on the GPU of another rank of the trainer; got "
            f"reward.model_replicas={reward.model_replicas} and trainer.ranks={ranks}; lower the first, or set "
            "cluster.roles=separate"
        )
