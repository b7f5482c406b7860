"""Functions whose results are checked: a wrong shape from another author's would train on, and train wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from rlflow.algorithms.advantage.base import AdvantageFunction, Advantages, Group, Scored
from rlflow.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.algorithms.correction.base import CorrectionFunction
    from rlflow.algorithms.loss.base import PolicyLoss, TokenLoss
    from rlflow.algorithms.tokens import Tokens

_LONGEST = 80
"""Characters of a value that a message shows."""


def checked_advantage(function: Callable[[Sequence[Group]], object], name: str) -> AdvantageFunction:
    """The advantage `name`, whose result becomes plain floats; arrays and tensors are taken too.

    It raises ConfigError unless each episode of each group has one finite value, or one for each turn.
    """

    def checked(groups: Sequence[Group]) -> Advantages:
        found = function(groups)
        entries = _items(found)
        if entries is None or len(entries) != len(groups):
            raise _wrong_advantages(name, found, f"{len(groups)} groups")
        return [_of_group(values, group, name) for values, group in zip(entries, groups, strict=True)]

    return checked


def checked_loss(function: PolicyLoss, name: str) -> PolicyLoss:
    """The loss `name`; it raises ConfigError for a result that has not one value for each token."""
    from rlflow.algorithms.loss.base import TokenLoss  # imports torch, which advantages do not need

    def checked(tokens: Tokens) -> TokenLoss:
        found = function(tokens)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(
                f"algorithm.loss={name} must return a TokenLoss, of rlflow.algorithms.loss.base; got "
                f"{type(found).__name__}"
            )
        count = len(tokens.logprobs)
        return TokenLoss(
            loss=_per_token(found[0], count, f"the loss of algorithm.loss={name}"),
            is_clipped=_per_token(found[1], count, f"is_clipped of algorithm.loss={name}"),
        )

    return checked


def checked_correction(function: CorrectionFunction, name: str) -> CorrectionFunction:
    """The correction `name`; it raises ConfigError for a result that has not one value for each token."""

    def checked(tokens: Tokens, target: Tensor) -> Tensor:
        weights = function(tokens, target)
        return _per_token(weights, len(tokens.logprobs), f"the weights of algorithm.corrections.{name}")

    return checked


def _per_token(found: object, count: int, what: str) -> Tensor:
    from torch import Tensor

    if isinstance(found, Tensor) and found.shape == (count,):
        return found
    shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else _shown(found)
    raise ConfigError(f"{what} must be a tensor with one value for each loss token, here [{count}]; got {shown}")


def _of_group(found: object, group: Group, name: str) -> list[list[float]]:
    episodes = _items(found)
    if episodes is None or len(episodes) != len(group):
        raise _wrong_advantages(name, found, f"a group of {len(group)} episodes")
    return [_of_episode(values, episode, name) for values, episode in zip(episodes, group, strict=True)]


def _of_episode(found: object, episode: Scored, name: str) -> list[float]:
    values = _items(found)
    num_turns = len(episode.turns)
    is_right = values is not None and len(values) in (1, num_turns or 1)
    if values is None or not is_right or not all(isinstance(value, Real) and math.isfinite(value) for value in values):
        turns = f"an episode of {num_turns} turns" if num_turns else "an episode"
        raise _wrong_advantages(name, found, turns)
    return [float(value) for value in values]


def _items(found: object) -> list[Any] | None:
    """The items of a list, tuple, array or tensor; None for what has none in order."""
    to_list = getattr(found, "tolist", None)
    values: object = found if to_list is None else to_list()
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


def _wrong_advantages(name: str, found: object, of_what: str) -> ConfigError:
    return ConfigError(
        f"algorithm.advantage={name} returned {_shown(found)} for {of_what}; it must return a list with an entry for "
        "each group, which is a list with an entry for each episode, which is a list of one finite number, or of one "
        "for each turn"
    )


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
