"""What is simulated: a fleet, how long its episodes are, how fast its trainer is. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlflow.config import Late, Order, Update
from rlflow.errors import ConfigError

_INTERVALS = 4096
_FAR = 8.0
"""Standard deviations beyond which nothing lies."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """A fleet and the run on it.

    Lengths are log-normal and cut at `max_tokens`. The defaults have the tail of long reasoning: room for 27k tokens,
    as in AReaL's runs (2505.24298), most answers far shorter.
    """

    engines: int = 64
    in_flight: int = 8
    """Groups that one engine plays at the same time."""
    group_size: int = 8
    groups_per_step: int | None = None
    """None means as many as the fleet plays at the same time."""
    max_versions: int = 4
    order: Order = Order.oldest_first
    late: Late = Late.requeue
    update: Update = Update.rolling
    steps: int = 20
    """Optimiser steps that are measured, after those of the warm-up."""
    median_tokens: float = 2000.0
    sigma: float = 1.0
    """Standard deviation of the logarithm of the length."""
    max_tokens: int = 27648
    token_s: float = 0.02
    """Seconds that an engine takes for one more token of each of its sequences."""
    weights_s: float = 5.0
    """Seconds that an engine pauses for new weights."""
    trainer_speed: float = 1.0
    """Tokens a second of the trainer over those that the fleet samples when it is never idle."""
    failures: float = 0.0
    """Probability that a group is lost half-way."""
    seed: int = 0

    @property
    def slots(self) -> int:
        """Groups that the fleet plays at the same time."""
        return self.engines * self.in_flight

    @property
    def step_groups(self) -> int:
        return self.slots if self.groups_per_step is None else self.groups_per_step

    @property
    def warm_up_steps(self) -> int:
        """Steps that are left out: the first wave starts all at once, and the last of it ends in the oldest step."""
        return self.max_versions + 4

    @property
    def fleet_tokens_per_s(self) -> float:
        """Tokens that the fleet samples when each slot always plays a group."""
        longest_s = self.mean_longest_tokens * self.token_s
        return self.slots * self.group_size * self.mean_tokens / longest_s

    @property
    def train_token_s(self) -> float:
        """Seconds that the trainer takes for one token."""
        return 1.0 / (self.trainer_speed * self.fleet_tokens_per_s)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of one episode."""
        return self._mean_of_longest(1)

    @property
    def mean_longest_tokens(self) -> float:
        """Mean tokens of the longest episode of a group, for which its slot is held."""
        return self._mean_of_longest(self.group_size)

    def _mean_of_longest(self, count: int) -> float:
        """Mean of the longest of `count` lengths: the integral over [0, max_tokens] of 1 - P(length <= x)^count.

        In steps of the logarithm, as x = median exp(sigma z).
        """
        if self.sigma == 0:
            return min(self.median_tokens, float(self.max_tokens))
        far = _FAR + self.sigma
        end = min(far, max(-far, math.log(self.max_tokens / self.median_tokens) / self.sigma))
        width = (end + far) / _INTERVALS
        total = self.median_tokens * math.exp(-self.sigma * far)
        for i in range(_INTERVALS):
            z = -far + (i + 0.5) * width
            share_below = 0.5 * (1 + math.erf(z / math.sqrt(2)))
            total += width * self.sigma * self.median_tokens * math.exp(self.sigma * z) * (1 - share_below**count)
        return total


_AT_LEAST_1 = (lambda value: value >= 1, "must be at least 1")
_NOT_NEGATIVE = (lambda value: value >= 0, "must not be negative")
_POSITIVE_NUMBER = (lambda value: value > 0, "must be a positive number")
_NUMBER_FROM_0 = (lambda value: value >= 0, "must be a number that is not negative")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "engines": _AT_LEAST_1,
    "in_flight": _AT_LEAST_1,
    "steps": _AT_LEAST_1,
    "max_tokens": _AT_LEAST_1,
    "groups_per_step": _AT_LEAST_1,
    "group_size": (lambda value: value >= 2, "must be at least 2, to have something to compare"),
    "max_versions": _NOT_NEGATIVE,
    "seed": _NOT_NEGATIVE,
    "median_tokens": _POSITIVE_NUMBER,
    "token_s": _POSITIVE_NUMBER,
    "trainer_speed": _POSITIVE_NUMBER,
    "sigma": _NUMBER_FROM_0,
    "weights_s": _NUMBER_FROM_0,
    "failures": (lambda value: 0 <= value < 1, "is a probability in [0, 1)"),
}
"""Field of Plan -> whether a fleet can have a value, and what it must be."""


def check(plan: Plan) -> None:
    """Raise ConfigError for the first value that no fleet can have."""
    for name, (is_possible, wanted) in _RANGES.items():
        value = getattr(plan, name)
        if value is not None and not (math.isfinite(value) and is_possible(value)):
            option = "staleness" if name == "max_versions" else name.replace("_", "-")
            raise ConfigError(f"--{option} {wanted}; got {value}")
