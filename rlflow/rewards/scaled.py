"""From the score of a reward model to a reward: the options of `reward.args` with `reward.model`."""

import math
from collections.abc import Callable, Mapping

from rlflow.errors import ConfigError
from rlflow.plugins.options import bind


def scaled(
    score: float,
    setting: str = "reward.args",
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    clip: float | None = None,
) -> float:
    """(score - mean) / deviation, and if there is a clip, at most that far from 0.

    `mean` and `deviation` are those of the model's scores, measured once: statistics that moved with the run would
    give the same reply another reward later. Raises ConfigError for options out of range, which `setting` has.

    Example: scaled(7.0, mean=1.0, deviation=2.0, clip=2.5) == 2.5
    """
    if not math.isfinite(mean):
        raise ConfigError(f"{setting}.mean must be a finite number; got {mean}")
    if not 0 < deviation < math.inf:
        raise ConfigError(f"{setting}.deviation must be positive and finite; got {deviation}")
    if clip is not None and not clip > 0:
        raise ConfigError(f"{setting}.clip must be positive, or null for no clip; got {clip}")
    reward = (score - mean) / deviation
    return reward if clip is None else min(max(reward, -clip), clip)


def scaling_of(options: Mapping[str, object], setting: str = "reward.args") -> Callable[[float], float]:
    """`scaled` with these options, which `setting` has.

    Raises ConfigError for one that is unknown, of the wrong type or out of range.
    """
    scaling = bind(scaled, options, setting, "reward.model")
    scaling(0.0, setting)
    return scaling
