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
        return [
            [of_episode(values, episode) for values, episode in zip(of_group(entries, group), group, strict=True)]
            for entries, group in zip(items(found, f"{len(groups)} groups", len(groups)), groups, strict=True)
        ]

    def of_group(found: object, group: Group) -> list[Any]:
        return items(found, f"a group of {len(group)} episodes", len(group))

    def of_episode(found: object, episode: Scored) -> list[float]:
        num_turns = len(episode.turns)
        owner = f"an episode of {num_turns} turns" if num_turns else "an episode"
        values = items(found, owner, 1, num_turns or 1)
        if not all(isinstance(value, Real) and math.isfinite(value) for value in values):
            raise wrong(found, owner)
        return [float(value) for value in values]

    def items(found: Any, owner: str, *counts: int) -> list[Any]:
        """The items of a list, tuple, array or tensor that has as many as one of `counts`."""
        values = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) not in counts:
            raise wrong(found, owner)
        return list(values)

    def wrong(found: object, owner: str) -> ConfigError:
        return ConfigError(
            f"algorithm.advantage={name} returned {_shown(found)} for {owner}; it must return a list with an entry for "
            "each group, which is a list with an entry for each episode, which is a list of one finite number, or of "
            "one for each turn"
        )

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


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
