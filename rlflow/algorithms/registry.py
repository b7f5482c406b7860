"""The algorithm of a run, from its settings: `algorithm.loss: gspo` with `algorithm.loss_args: {clip_low: 3e-4}`.

name -> its catalog -> function, traits -> with its options -> tried on nothing -> its results checked

Nothing is imported before it is asked for: advantages need no torch, whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlflow.algorithms.advantage.base import Advantages, Group, Scope
from rlflow.algorithms.base import Traits
from rlflow.algorithms.check_returns import checked_advantage, checked_correction, checked_loss
from rlflow.algorithms.distillation import distillation_of
from rlflow.config import Aggregation, AlgorithmConfig, Config, CriticConfig, Late, Proximal
from rlflow.errors import ConfigError
from rlflow.plugins.catalog import Catalog, modules_of
from rlflow.plugins.options import bind
from rlflow.runtime.derived import learns_from_rewards

if TYPE_CHECKING:
    from rlflow.algorithms.correction.base import CorrectionFunction
    from rlflow.algorithms.kl.base import KlEstimate
    from rlflow.algorithms.loss.base import PolicyLoss
    from rlflow.algorithms.token_advantage.gae import TokenAdvantage


class Kind(StrEnum):
    advantage = "advantage"
    token_advantage = "token_advantage"
    """A value for each token, from a critic; named by the same setting as `advantage`."""
    loss = "loss"
    correction = "correction"
    kl = "kl"


CATALOGS = {
    kind: Catalog(
        setting=setting,
        what=what,
        shipped=modules_of(f"rlflow.algorithms.{kind}"),
        group=group,
        others=tuple(modules_of("rlflow.algorithms.token_advantage")) if kind is Kind.advantage else (),
    )
    for kind, setting, what, group in (
        (Kind.advantage, "algorithm.advantage", "an advantage", "rlflow.advantages"),
        (Kind.token_advantage, "algorithm.advantage", "an advantage of single tokens", None),
        (Kind.loss, "algorithm.loss", "a loss", "rlflow.losses"),
        (Kind.correction, "algorithm.corrections", "a correction", "rlflow.corrections"),
        (Kind.kl, "algorithm.kl", "an estimate of the KL", "rlflow.kl"),
    )
}


class Algorithm(NamedTuple):
    function: Callable[..., Any]
    traits: Traits


class ChosenObjective(NamedTuple):
    loss: PolicyLoss
    corrections: tuple[CorrectionFunction, ...]
    kl: KlEstimate


def resolve(kind: Kind, name: str) -> Algorithm:
    """The algorithm of this name, of an installed package, or at `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: there is no such algorithm, or it cannot be imported or called.
    """
    function = CATALOGS[kind].find(name)
    if not callable(function):
        raise ConfigError(f"the {kind} {name!r} must be a function; got {type(function).__name__}")
    try:
        return Algorithm(function, Traits.of(function))
    except ValueError as error:
        raise ConfigError(f"the scope of {name!r} must be one of {', '.join(Scope)}; {error}") from error


def try_options(kind: Kind, function: Callable[..., Any]) -> None:
    """Call a bound function on nothing, so that an option out of range is found at start, not in the first step."""
    if kind is Kind.advantage:
        function([])
    elif kind is Kind.token_advantage:
        function(np.zeros(0), np.zeros(0), np.zeros(0, np.bool_))
    else:
        from rlflow.algorithms.tokens import no_tokens

        tokens = no_tokens()
        given = {Kind.loss: [tokens], Kind.correction: [tokens, tokens.logprobs], Kind.kl: [tokens.logprobs] * 2}
        function(*given[kind])


def advantage_of(algorithm: AlgorithmConfig) -> Algorithm:
    """Imports no torch. Raises ConfigError for an unknown name or option, or an option out of range.

    With a critic, episodes have their rewards here; tokens get their advantages from `token_advantage_of`.
    """
    if needs_critic(algorithm):
        return Algorithm(_rewards_alone, Traits(scope=Scope.batch, compares=False))
    options = dict(algorithm.advantage_args)
    if resolve(Kind.advantage, algorithm.advantage).traits.needs_log_ratios:
        if "beta" in options:
            raise ConfigError("algorithm.advantage_args.beta is algorithm.kl_coefficient here; set that in its place")
        options["beta"] = algorithm.kl_coefficient
    found = _bound(Kind.advantage, algorithm.advantage, options, "algorithm.advantage_args")
    return found._replace(function=checked_advantage(found.function, algorithm.advantage))


def chosen_advantage(config: Config) -> Algorithm:
    """`advantage_of` the settings; zeros for groups of any size, if nothing is learnt from rewards."""
    if learns_from_rewards(config):
        return advantage_of(config.algorithm)
    return Algorithm(lambda groups: [[[0.0] for _ in group] for group in groups], Traits(compares=False))


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    return algorithm.advantage in CATALOGS[Kind.token_advantage].shipped


def token_advantage_of(algorithm: AlgorithmConfig) -> TokenAdvantage:
    """The estimator, if `needs_critic`. Raises ConfigError for an option that is unknown or out of range."""
    options = algorithm.advantage_args
    return _bound(Kind.token_advantage, algorithm.advantage, options, "algorithm.advantage_args").function


def _rewards_alone(groups: Sequence[Group]) -> Advantages:
    return [[[episode.reward] for episode in group] for group in groups]


def objective_of(algorithm: AlgorithmConfig) -> ChosenObjective:
    """Imports torch. Raises ConfigError for an unknown name or option, or an option out of range.

    The loss and the corrections raise it too, unless the result has one value for each token.
    """
    loss = _bound(Kind.loss, algorithm.loss, algorithm.loss_args, "algorithm.loss_args").function
    corrections = {
        name: _bound(Kind.correction, name, args or {}, f"algorithm.corrections.{name}").function
        for name, args in algorithm.corrections.items()
    }
    return ChosenObjective(
        loss=checked_loss(loss, algorithm.loss),
        corrections=tuple(checked_correction(function, name) for name, function in corrections.items()),
        kl=_bound(Kind.kl, algorithm.kl, {}, "algorithm.kl").function,
    )


def check_functions(config: Config) -> None:
    """Raise ConfigError for a function that cannot be found or called so, or for some that do not go together."""
    algorithm = config.algorithm
    if config.teacher.models:
        distillation_of(config.teacher)
    if not needs_critic(algorithm) and resolve(Kind.advantage, algorithm.advantage).traits.needs_log_ratios:
        _check_log_ratios(config)
    chosen = chosen_advantage(config)
    if chosen.traits.compares and algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size must be at least 2 with algorithm.advantage={algorithm.advantage}, which compares "
            f"the episodes of a group; got {algorithm.group_size}; raise it, or take gae, reinforce_pp or remax"
        )
    if needs_critic(algorithm):
        token_advantage_of(algorithm)
    elif algorithm.kl_in_reward and not chosen.traits.needs_log_ratios:
        raise ConfigError(
            "algorithm.kl_in_reward=true needs rewards of single tokens, and "
            f"algorithm.advantage={algorithm.advantage} compares episodes; set it to false, or take "
            "algorithm.advantage=gae"
        )
    elif config.critic != CriticConfig():
        raise ConfigError(
            f"critic has no effect with algorithm.advantage={algorithm.advantage}, which needs no critic; leave its "
            f"settings alone, or take algorithm.advantage=gae"
        )
    if chosen.traits.scope is Scope.batch and config.trainer.streaming is False:
        raise ConfigError(
            f"trainer.streaming=false has no effect with algorithm.advantage={algorithm.advantage}, which waits for "
            "all groups of a step anyway; leave it null"
        )
    objective_of(algorithm)
    loss = resolve(Kind.loss, algorithm.loss).traits
    weights = [name for name in algorithm.corrections if not resolve(Kind.correction, name).traits.is_mask]
    # The ratio to the behaviour policy must be in the gradient once, not twice.
    uses_proximal = not (loss.is_corrected or loss.has_no_ratio)
    if algorithm.proximal is not Proximal.behaviour and not uses_proximal:
        raise ConfigError(
            f"algorithm.proximal={algorithm.proximal} has no effect with algorithm.loss={algorithm.loss}, which does "
            "not compare with the proximal policy; set it to behaviour"
        )
    has_ratio = loss.is_corrected or (uses_proximal and algorithm.proximal is Proximal.behaviour)
    # What another author's function does is not known for certain.
    if weights and has_ratio and algorithm.loss in CATALOGS[Kind.loss].shipped:
        raise ConfigError(
            f"algorithm.corrections.{weights[0]} weighs by the ratio to the policy that sampled, which "
            f"algorithm.loss={algorithm.loss} does already; take algorithm.loss=reinforce, or "
            "algorithm.proximal=recomputed or interpolated, or leave the correction out"
        )
    if config.rollout.quantization is not None and not (weights or has_ratio):
        raise ConfigError(
            f"rollout.quantization={config.rollout.quantization} samples from another policy than the one that is "
            "trained, and nothing here weighs by the ratio of the two; take algorithm=tis, or set rollout.quantization "
            "to null"
        )
    if config.staleness.late is Late.train and not (weights or loss.is_corrected):
        raise ConfigError(
            "staleness.late=train trains on tokens of any age, which needs a correction; take algorithm=tis, or set "
            "staleness.late to mask or requeue"
        )


def _check_log_ratios(config: Config) -> None:
    """Raise ConfigError where an advantage of pairs would not be the gradient of its loss."""
    algorithm = config.algorithm
    is_summed = algorithm.aggregation is Aggregation.token_sum
    has_likelihoods = resolve(Kind.loss, algorithm.loss).traits.has_no_ratio
    takes_all = not algorithm.corrections
    wanted = [
        ("algorithm.kl_coefficient", algorithm.kl_coefficient > 0, "above 0, because it is the beta"),
        ("algorithm.kl_in_reward", algorithm.kl_in_reward, "true, because the KL is part of the loss"),
        ("algorithm.loss", has_likelihoods, "reinforce, because likelihoods are compared"),
        ("algorithm.aggregation", is_summed, "token_sum, because whole replies are compared"),
        ("algorithm.corrections", takes_all, "left out, because whole replies are compared"),
        ("algorithm.mask_truncated", not algorithm.mask_truncated, "false, because a pair is trained whole"),
        ("algorithm.entropy_high", algorithm.entropy_high is None, "null, because a pair is trained whole"),
        ("staleness.late", config.staleness.late is not Late.mask, "requeue or train, because a pair is trained whole"),
        ("algorithm.epochs", algorithm.epochs == 1, "1, because a comparison holds for one update"),
        ("algorithm.minibatches", algorithm.minibatches == 1, "1, because a comparison holds for one update"),
        ("teacher.models", not config.teacher.models, "left out, because rewards alone decide which reply is better"),
    ]
    for name, holds, must_be in wanted:
        if not holds:
            found = attrgetter(name)(config)
            raise ConfigError(f"{name} must be {must_be} with algorithm.advantage={algorithm.advantage}; got {found}")


def _bound(kind: Kind, name: str, options: Mapping[str, Any], setting: str) -> Algorithm:
    found = resolve(kind, name)
    function = bind(found.function, options, setting, f"the {kind.replace('_', ' ')} {name}")
    if name in CATALOGS[kind].shipped:
        try_options(kind, function)
    return found._replace(function=function)
