"""Advantages of single tokens with a critic (GAE, arXiv:1506.02438), and whitening. NumPy, one sequence at a time.

Shape letter: L tokens of a sequence after its prompt, those without loss included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlflow.algorithms.base import require
from rlflow.types import BoolArray

DoubleArray = NDArray[np.float64]
_EPSILON = 1e-8
"""Added to a variance before its root divides."""


class TokenAdvantages(NamedTuple):
    advantages: DoubleArray
    """[L], 0 where there is no loss."""
    returns: DoubleArray
    """[L], what the critic learns: advantage + value; 0 where there is no loss."""


TokenAdvantage: TypeAlias = Callable[[NDArray[np.floating], NDArray[np.floating], BoolArray], TokenAdvantages]
"""An estimator with its options bound: rewards, values and mask of a sequence, all [L] -> its advantages."""


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    mask: BoolArray,
    *,
    discount: float = 1.0,
    trace: float = 0.95,
) -> TokenAdvantages:
    """A_t = d_t + discount * trace * A_next with d_t = r_t + discount * V_next - V_t, over the tokens with loss.

    All arrays are [L]. Tokens without loss (observations) are skipped: the next token is the next one that the policy
    sampled. The value after the last is 0.
    """
    require(0 <= discount <= 1, "discount", "from 0 to 1", discount)
    require(0 <= trace <= 1, "trace", "from 0 to 1", trace)
    found = np.asarray(values, np.float64)[mask]
    following = np.append(found[1:], 0.0)[: len(found)]
    errors = np.asarray(rewards, np.float64)[mask] + discount * following - found
    advantage = 0.0
    collected: list[float] = []
    for error in reversed(errors.tolist()):
        advantage = error + discount * trace * advantage
        collected.append(advantage)
    advantages = np.zeros(len(mask))
    advantages[mask] = collected[::-1]
    returns = np.zeros(len(mask))
    returns[mask] = advantages[mask] + found
    return TokenAdvantages(advantages=advantages, returns=returns)


def token_rewards(
    earned: Sequence[float],
    last_tokens: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    reference_logprobs: NDArray[np.floating],
    mask: BoolArray,
    kl_coefficient: float,
) -> DoubleArray:
    """-kl_coefficient * log(policy / reference) of each token, and what each turn earned on its last token; [L].

    `last_tokens` says where that is. 0 where there is no loss.
    """
    difference = np.asarray(logprobs, np.float64) - np.asarray(reference_logprobs, np.float64)
    rewards = np.where(mask, -kl_coefficient * difference, 0.0)
    rewards[last_tokens] += earned
    return rewards


class Moments(NamedTuple):
    """Sums from which a mean and a variance follow. Those of several ranks add up field by field."""

    weight: float
    total: float
    squares: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.floating], weights: Sequence[float] | BoolArray) -> Moments:
        """Each value counts `weights` times: a mask of tokens, or the tokens of an episode."""
        numbers, counts = np.asarray(values, np.float64), np.asarray(weights, np.float64)
        return cls(
            weight=float(counts.sum()),
            total=float((counts * numbers).sum()),
            squares=float((counts * numbers**2).sum()),
        )

    def plus(self, other: Moments) -> Moments:
        return Moments(self.weight + other.weight, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.weight

    @property
    def variance(self) -> float:
        """With divisor n; what rounding leaves of it when all values are equal counts as 0."""
        variance = self.squares / self.weight - self.mean**2
        return variance if variance > 1e-12 * self.mean**2 else 0.0


def whiten_value(value: float, moments: Moments) -> float:
    """(value - mean) / sqrt(variance + 1e-8); exactly 0 if all values are equal."""
    variance = moments.variance
    return (value - moments.mean) / math.sqrt(variance + _EPSILON) if variance else 0.0


def whiten(values: NDArray[np.floating], mask: BoolArray, moments: Moments) -> DoubleArray:
    """The same for the tokens [L] with loss; 0 for the others."""
    whitened = np.zeros(len(mask))
    if mask.any() and (variance := moments.variance):
        whitened[mask] = (np.asarray(values, np.float64)[mask] - moments.mean) / math.sqrt(variance + _EPSILON)
    return whitened
