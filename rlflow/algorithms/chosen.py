"""The algorithm of a run, from its settings: functions with their options, and whether they go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.algorithms.advantage.base import AdvantageFunction, Advantages, Group, Scope
from rlflow.algorithms.advantage.gae import TokenAdvantages
from rlflow.algorithms.names import NAMES, Algorithm, Kind, bind, resolve, try_options
from rlflow.algorithms.returned import advantages_of, per_token
from rlflow.config import AlgorithmConfig, Config, CriticConfig, Late, Proximal
from rlflow.errors import ConfigError
from rlflow.types import BoolArray

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.algorithms.kl import KlEstimate
    from rlflow.algorithms.loss.base import PolicyLoss
    from rlflow.algorithms.tokens import Tokens

WITHOUT_RATIO = "reinforce"
"""The loss that compares with no other policy, so that a correction may weigh it by one."""


class ChosenAdvantage(NamedTuple):
    function: AdvantageFunction
    needs_batch: bool
    """Whether it must see all groups of a step at once."""
    needs_greedy: bool
    """Whether each group plays one more episode, greedily, as its baseline."""


class TokenAdvantage(Protocol):
    """An estimator of single tokens with its options bound; see `algorithms.advantage.gae`."""

    def __call__(
        self, rewards: NDArray[np.floating], values: NDArray[np.floating], mask: BoolArray, /
    ) -> TokenAdvantages: ...


class ChosenObjective(NamedTuple):
    loss: PolicyLoss
    corrections: tuple[Callable[[Tokens, Tensor], Tensor], ...]
    kl: KlEstimate


def advantage_of(algorithm: AlgorithmConfig) -> ChosenAdvantage:
    """Imports no torch. Raises ConfigError for an unknown name or option, or an option out of range.

    Where a critic decides, episodes have their rewards here; tokens get their advantages from `token_advantage_of`.
    """
    if needs_critic(algorithm):
        return ChosenAdvantage(function=_rewards_alone, needs_batch=True, needs_greedy=False)
    found, function = _bound(Kind.advantage, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")

    def checked(groups: Sequence[Group]) -> Advantages:
        return advantages_of(function, groups, algorithm.advantage)

    return ChosenAdvantage(function=checked, needs_batch=found.scope is Scope.batch, needs_greedy=found.needs_greedy)


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    return algorithm.advantage in NAMES[Kind.token_advantage]


def token_advantage_of(algorithm: AlgorithmConfig) -> TokenAdvantage:
    """The estimator, where `needs_critic`. Raises ConfigError for an option that is unknown or out of range."""
    return _bound(Kind.token_advantage, algorithm.advantage, algorithm.advantage_args, "algorithm.advantage_args")[1]


def _rewards_alone(groups: Sequence[Group]) -> Advantages:
    return [[[episode.reward] for episode in group] for group in groups]


def objective_of(algorithm: AlgorithmConfig) -> ChosenObjective:
    """Imports torch. Raises ConfigError for an unknown name or option, or an option out of range.

    The loss and the corrections raise it too, for a result that has not one value for each token.
    """
    _, loss = _bound(Kind.loss, algorithm.loss, algorithm.loss_args, "algorithm.loss_args")
    corrections = tuple(
        _checked_correction(_bound(Kind.correction, name, args or {}, f"algorithm.corrections.{name}")[1], name)
        for name, args in algorithm.corrections.items()
    )
    _, kl = _bound(Kind.kl, algorithm.kl, {}, "algorithm.kl")
    return ChosenObjective(loss=_checked_loss(loss, algorithm.loss), corrections=corrections, kl=kl)


def _checked_loss(function: PolicyLoss, name: str) -> PolicyLoss:
    from rlflow.algorithms.loss.base import TokenLoss

    def checked(tokens: Tokens) -> TokenLoss:
        found = function(tokens)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(
                f"algorithm.loss={name} must return a TokenLoss, of rlflow.algorithms.loss.base; got "
                f"{type(found).__name__}"
            )
        count = len(tokens.logprobs)
        return TokenLoss(
            loss=per_token(found[0], count, f"the loss of algorithm.loss={name}"),
            is_clipped=per_token(found[1], count, f"is_clipped of algorithm.loss={name}"),
        )

    return checked


def _checked_correction(function: Callable[[Tokens, Tensor], Tensor], name: str) -> Callable[[Tokens, Tensor], Tensor]:
    def checked(tokens: Tokens, target: Tensor) -> Tensor:
        weights = function(tokens, target)
        return per_token(weights, len(tokens.logprobs), f"the weights of algorithm.corrections.{name}")

    return checked


def check_functions(config: Config) -> None:
    """Raise ConfigError for a function that cannot be found or called so, or for some that do not go together."""
    algorithm = config.algorithm
    chosen = advantage_of(algorithm)
    if needs_critic(algorithm):
        token_advantage_of(algorithm)
    elif algorithm.kl_in_reward:
        raise ConfigError(
            "algorithm.kl_in_reward=true needs rewards of single tokens, and "
            f"algorithm.advantage={algorithm.advantage} compares episodes; set it to false, or take "
            "algorithm.advantage=gae"
        )
    elif config.critic != CriticConfig():
        raise ConfigError(
            f"critic has no effect with algorithm.advantage={algorithm.advantage}, which needs no critic; leave its "
            f"settings alone, or take algorithm.advantage={NAMES[Kind.token_advantage][0]}"
        )
    if chosen.needs_batch and not config.trainer.streaming:
        raise ConfigError(
            f"trainer.streaming=false has no effect with algorithm.advantage={algorithm.advantage}, which waits for "
            "all groups of a step anyway; leave it true"
        )
    objective_of(algorithm)
    loss = resolve(Kind.loss, algorithm.loss)
    weights = [name for name in algorithm.corrections if not resolve(Kind.correction, name).is_mask]
    _check_ratios(algorithm, loss, weights)
    if config.staleness.late is Late.train and not (weights or loss.is_corrected):
        raise ConfigError(
            "staleness.late=train trains on tokens of any age, which needs a correction; take algorithm=tis, or set "
            "staleness.late to mask or requeue"
        )


def _check_ratios(algorithm: AlgorithmConfig, loss: Algorithm, weights: list[str]) -> None:
    """The ratio to the behaviour policy must be in the gradient once, not twice."""
    is_own = ":" in algorithm.loss
    uses_proximal = not (loss.is_corrected or algorithm.loss == WITHOUT_RATIO)
    if algorithm.proximal is Proximal.interpolated and not uses_proximal:
        raise ConfigError(
            f"algorithm.proximal=interpolated has no effect with algorithm.loss={algorithm.loss}, which does not "
            "compare with the proximal policy; set it to behaviour"
        )
    has_ratio = loss.is_corrected or (uses_proximal and algorithm.proximal is Proximal.behaviour)
    if weights and has_ratio and not is_own:
        raise ConfigError(
            f"algorithm.corrections.{weights[0]} weighs by the ratio to the policy that sampled, which "
            f"algorithm.loss={algorithm.loss} does already; take algorithm.loss={WITHOUT_RATIO}, or "
            "algorithm.proximal=interpolated, or leave the correction out"
        )


def _bound(kind: Kind, name: str, args: Mapping[str, Any], where: str) -> tuple[Algorithm, Callable[..., Any]]:
    found = resolve(kind, name)
    if kind is Kind.kl:
        return found, found.function
    if not isinstance(args, Mapping):
        raise ConfigError(f"{where} must be options as name: value; got {args!r}")
    function = bind(found.function, args, where)
    if isinstance(function, partial) and ":" not in name:
        try_options(kind, function)
    return found, function
