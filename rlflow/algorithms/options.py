"""How an algorithm refuses an option that is out of range."""

from __future__ import annotations

import math

from rlflow.errors import ConfigError


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
