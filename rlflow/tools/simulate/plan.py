"""What is simulated: a fleet, how long its episodes are, how fast its trainer is; and what comes of it. Pure."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_type_hints

from rlflow.config import Late, Order, Update
from rlflow.errors import ConfigError

_INTERVALS = 4096
_FAR = 8.0
"""Standard deviations beyond which nothing lies."""
_Range = tuple[Callable[[float], bool], str]
"""Whether a fleet can have a value, and what it must be."""
_AT_LEAST_1: _Range = (lambda value: value >= 1, "must be at least 1")
_AT_LEAST_2: _Range = (lambda value: value >= 2, "must be at least 2, to have something to compare")
_NOT_NEGATIVE: _Range = (lambda value: value >= 0, "must not be negative")
_POSITIVE_NUMBER: _Range = (lambda value: value > 0, "must be a positive number")
_NUMBER_FROM_0: _Range = (lambda value: value >= 0, "must be a number that is not negative")
_PROBABILITY: _Range = (lambda value: 0 <= value < 1, "is a probability in [0, 1)")


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """A fleet and the run on it: type, meaning and range of each setting, which is an option of the command.

    Lengths are log-normal and cut at `max_tokens`. The defaults have the tail of long reasoning: room for 27k tokens,
    as in AReaL's runs (2505.24298), most answers far shorter.
    """

    engines: Annotated[int, "rollout engines", _AT_LEAST_1] = 64
    in_flight: Annotated[int, "groups that one engine plays at the same time", _AT_LEAST_1] = 8
    group_size: Annotated[int, "episodes of a group", _AT_LEAST_2] = 8
    groups_per_step: Annotated[
        int | None,
        "groups of an optimiser step; by default, as many as the fleet plays at the same time",
        _AT_LEAST_1,
    ] = None
    max_versions: Annotated[int, "bound on staleness in versions", _NOT_NEGATIVE] = 4
    order: Annotated[Order, "which ready group is trained first"] = Order.oldest_first
    late: Annotated[Late, "what becomes of a group that is too old"] = Late.requeue
    update: Annotated[Update, "how engines take new weights"] = Update.rolling
    steps: Annotated[int, "optimiser steps that are measured, after the warm-up", _AT_LEAST_1] = 20
    median_tokens: Annotated[float, "median length of an episode, of a log-normal distribution", _POSITIVE_NUMBER] = (
        2000.0
    )
    sigma: Annotated[float, "standard deviation of the logarithm of the length", _NUMBER_FROM_0] = 1.0
    max_tokens: Annotated[int, "at which an episode is cut", _AT_LEAST_1] = 27648
    token_s: Annotated[float, "seconds that an engine takes for one more token of each sequence", _POSITIVE_NUMBER] = (
        0.02
    )
    weights_s: Annotated[float, "seconds that an engine pauses for new weights", _NUMBER_FROM_0] = 5.0
    trainer_speed: Annotated[
        float, "tokens a second of the trainer, over those of a fleet that is never idle", _POSITIVE_NUMBER
    ] = 1.0
    ranks: Annotated[int, "ranks of the trainer, each of which is sent its share of the groups", _AT_LEAST_1] = 8
    failures: Annotated[float, "probability that a group is lost half-way", _PROBABILITY] = 0.0
    seed: Annotated[int, "of the lengths, the failures and the order of the tasks", _NOT_NEGATIVE] = 0

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


def check(plan: Plan) -> None:
    """Raise ConfigError for the first value that no fleet can have."""
    for name, hint in get_type_hints(Plan, include_extras=True).items():
        value = getattr(plan, name)
        for is_possible, wanted in hint.__metadata__[1:]:
            if value is not None and not (math.isfinite(value) and is_possible(value)):
                option = "staleness" if name == "max_versions" else name.replace("_", "-")
                raise ConfigError(f"--{option} {wanted}; got {value}")


@dataclass(kw_only=True, slots=True, frozen=True)
class Figures:
    """What a simulation showed, from the end of its warm-up to its last step. Times are virtual where not said."""

    engines: int
    slots: int
    groups_per_step: int
    max_versions: int
    steps: int
    step_s: float
    groups_per_s: float
    samples_per_s: float
    tokens_per_s: float
    utilisation_engines: float
    """Share of the slots' time in which they held a group that was being sampled."""
    utilisation_trainer: float
    staleness: dict[int, int]
    """Versions between a group's oldest token and the update that it entered -> groups."""
    dropped: dict[str, int]
    groups_started: int
    groups_ended: int
    """As the modelled runners count them, in the whole simulation."""
    driver_ms_per_group: float
    """Real processor milliseconds of the driver for each group that was trained or dropped."""
    wall_s: float
    """Real seconds, the warm-up included."""
    rss_first_mb: float
    """Real memory of the process at the end of the warm-up."""
    rss_last_mb: float

    def as_json(self) -> dict[str, Any]:
        mean = sum(age * count for age, count in self.staleness.items()) / sum(self.staleness.values())
        return {**asdict(self), "mean_staleness": mean}
