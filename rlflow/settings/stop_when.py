"""`run.stop_when`: a metric and a bound at which a run ends before its last step.

Example: "eval/reward>=0.9" is met by {"eval/reward": 0.93}, and not by {"eval/reward": None} or {"reward": 0.95}.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.groups.scores import FIGURES
from rlflow.plugins.names import did_you_mean

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
_OF_EVALUATION = re.compile(r"eval/(?:kind/.+/)?([^/]+)")


@dataclass(kw_only=True, slots=True, frozen=True)
class StopRule:
    metric: str
    sign: str
    bound: float

    @classmethod
    def of(cls, text: str) -> "StopRule":
        """Raises ConfigError for anything but a metric, one of >= <= > < and a number."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"run.stop_when must be a metric and a bound, such as 'eval/reward>=0.9' or 'entropy<0.1'; got {text!r}"
            )
        return cls(metric=match[1], sign=match[2], bound=float(match[3]))

    def is_met(self, metrics: Mapping[str, float | int | None]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and _COMPARE[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.bound:g}"


def check_stop(config: Config) -> None:
    """Raise ConfigError for a `run.stop_when` that is no rule, or whose evaluation will have no such figure.

    `telemetry.metrics.check_metric` looks at the other names.
    """
    if config.run.stop_when is None:
        return
    metric = StopRule.of(config.run.stop_when).metric
    if not metric.startswith("eval/"):
        return
    if not config.eval.every:
        raise ConfigError(f"run.stop_when={config.run.stop_when} needs evaluations; set eval.every")
    episodes = config.eval.episodes
    known = [*FIGURES, *(f"pass_at_{1 << power}" for power in range(episodes.bit_length()))]
    match = _OF_EVALUATION.fullmatch(metric)
    if match is None or match[1] not in known:
        near = did_you_mean(metric, [f"eval/{name}" for name in known])
        raise ConfigError(
            f"run.stop_when: an evaluation with eval.episodes={episodes} has no {metric}{near or ';'} it has "
            f"{', '.join(f'eval/{name}' for name in known)}"
        )
