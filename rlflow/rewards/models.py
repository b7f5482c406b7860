"""The reward models of a run, from its settings: one alone, or several with weights, beside functions if there are any.

reward.model: {helpful: a, harmless: b}, reward.function: [format], reward.weights: [0.1, 1, 2] (functions first)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.config import RewardConfig
from rlflow.errors import ConfigError
from rlflow.rewards.scaled import scaling_of

ALONE = "model"
"""What a reward model goes by that has no name of its own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChosenModel:
    name: str
    """In metrics, in messages, and below reward.args."""
    path: str
    weight: float
    args: dict[str, Any]
    """Options of `scaled`."""


def model_paths(reward: RewardConfig) -> dict[str, str]:
    """Name -> path of each reward model. Raises ConfigError for a setting that is neither a path nor names of paths."""
    if reward.model is None:
        return {}
    paths = {ALONE: reward.model} if isinstance(reward.model, str) else reward.model
    is_plain = isinstance(paths, Mapping) and all(isinstance(each, str) and each for each in (*paths, *paths.values()))
    if not is_plain or not paths:
        raise ConfigError(f"reward.model must be a path, or names of paths; got {reward.model!r:.200}")
    return dict(paths)


def is_model_alone(reward: RewardConfig) -> bool:
    """Whether the score of one model is the reward, so that nothing is weighed."""
    return isinstance(reward.model, str) and reward.function is None


def calls_functions(reward: RewardConfig) -> bool:
    """Whether functions score; with reward.model only those that reward.function names."""
    return reward.model is None or reward.function is not None


def weights_of(reward: RewardConfig) -> list[float]:
    """One for each function, then one for each model. Raises ConfigError for another number of them."""
    given = reward.function
    num_functions = len(given) if isinstance(given, Sequence) and not isinstance(given, str) else 1
    counts = {"function": num_functions if calls_functions(reward) else 0, "model": len(model_paths(reward))}
    if reward.weights is None:
        return [1.0] * sum(counts.values())
    if len(reward.weights) != sum(counts.values()):
        named = " and ".join(f"reward.{what} {count} names" for what, count in counts.items() if count)
        raise ConfigError(f"reward.weights has {len(reward.weights)} numbers and {named}; give one weight for each")
    return list(reward.weights)


def chosen_models(reward: RewardConfig) -> list[ChosenModel]:
    """In the order of the settings. Raises ConfigError for wrong weights and for options that a score has not."""
    paths = model_paths(reward)
    if is_model_alone(reward):
        scaling_of(reward.args)
        return [ChosenModel(name=ALONE, path=paths[ALONE], weight=1.0, args=reward.args)]
    found: list[ChosenModel] = []
    for (name, path), weight in zip(paths.items(), weights_of(reward)[-len(paths) :] if paths else [], strict=True):
        args = reward.args.get(name) or {}
        if not isinstance(args, Mapping):
            raise ConfigError(f"reward.args.{name} must be options as name: value; got {args!r:.80}")
        scaling_of(args, f"reward.args.{name}")
        found.append(ChosenModel(name=name, path=path, weight=weight, args=dict(args)))
    unknown = [name for name in reward.args if name not in paths]
    if unknown and not calls_functions(reward):
        raise ConfigError(
            f"reward.args.{unknown[0]} has no effect: reward.model names {', '.join(paths)}; leave it out"
        )
    return found
