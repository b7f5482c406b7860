"""What the definition of an algorithm says beside its formula: traits of the function, and ranges of its options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from rlflow.algorithms.advantage.base import Scope
from rlflow.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What callers have to know of an algorithm: a decorator, which makes them attributes of its function.

    A function outside rlflow may also set the attributes itself: `best_only.scope = "batch"`.
    """

    scope: Scope = Scope.group
    """Whether an advantage must see every group of the step."""
    compares: bool = True
    """Whether an advantage compares the episodes of a group, which then needs two."""
    is_per_turn: bool = False
    """Whether an advantage has a value for each turn of an episode, and so needs episodes with turns."""
    needs_log_ratios: bool = False
    """Whether an advantage needs `Scored.log_ratio`, which costs a pass through the model before the update. It has an
    option `beta`, which is algorithm.kl_coefficient."""
    needs_greedy: bool = False
    """Whether an advantage has each group play one more episode, greedily, as its baseline."""
    is_mask: bool = False
    """Whether the weights of a correction are 0 and 1 only, so that it may stand beside any loss and correction."""
    is_corrected: bool = False
    """Whether a loss weighs by policy / behaviour itself; a correction that is no mask would do so twice."""
    has_no_ratio: bool = False
    """Whether a loss compares with no other policy, so that a correction may weigh it."""

    def __call__(self, function: Function) -> Function:
        vars(function).update(asdict(self))
        return function

    @staticmethod
    def of(function: object) -> Traits:
        """The traits that a function has; the defaults for those that it does not mention. Raises ValueError."""
        said = {each.name: getattr(function, each.name, each.default) for each in fields(Traits)}
        return Traits(scope=Scope(said.pop("scope")), **{name: bool(value) for name, value in said.items()})


def require(holds: bool, option: str, must_be: str, found: object) -> None:
    """Raise ConfigError unless `holds`; `must_be` goes on "clip_low must be ..."."""
    if not holds:
        raise ConfigError(f"{option} must be {must_be}; got {found!r}")


def require_positive(option: str, value: float) -> None:
    require(0 < value < math.inf, option, "above 0 and finite", value)


def require_range(low: float, high: float) -> None:
    """`low` and `high` bound a probability ratio from both sides of 1."""
    require(0 <= low <= 1, "low", "from 0 to 1", low)
    require(high >= 1, "high", "1 or more", high)
    require(low < high, "low", f"below high, {high:g}", low)
