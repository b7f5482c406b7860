"""Tasks of each kind in fixed shares (task-balanced sampling, QwenLong-L1.5, arXiv:2512.12967)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.curriculum.base import Curriculum
from rlflow.curriculum.uniform import Uniform
from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean
from rlflow.runtime.kinds import name_for
from rlflow.types import Json, Task


class Balanced(Curriculum):
    """The kinds in turn, whatever their sizes; within a kind, shuffled passes."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, weights: Mapping[str, float] | None = None) -> None:
        """weights: kind -> how often it comes, relative to the others; 1 for a kind without. `a` has the kinds `a/b`
        together, unless one of them has a weight of its own.

        Raises ConfigError if all tasks are of one kind, for a weight of no kind, and one that is not positive.
        """
        given = dict(weights or {})
        of_kind: dict[str, list[Task]] = {}
        for task in tasks:
            of_kind.setdefault(name_for(task.kind, given) or task.kind, []).append(task)
        kinds = list(of_kind)
        if len(kinds) < 2:
            raise ConfigError(
                f"curriculum.kind=balanced has no effect where all {len(tasks)} tasks are of one kind, "
                f"{kinds[0]!r}; give them kinds (Task.kind), or set it to uniform"
            )
        for kind, weight in given.items():
            if kind not in of_kind:
                raise ConfigError(
                    f"curriculum.args.weights.{kind} has no effect: no task is of this kind"
                    f"{did_you_mean(kind, kinds)}; kinds are {', '.join(kinds)}"
                )
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(f"curriculum.args.weights.{kind} must be a positive number; got {weight!r}")
        self._weights = {kind: float(given.get(kind, 1.0)) for kind in kinds}
        self._passes = {kind: Uniform(those, f"{seed}/{kind}") for kind, those in of_kind.items()}
        self._due = dict.fromkeys(kinds, 0.0)
        """How much each kind has to come; sums to 0."""

    def next(self) -> Task:
        for kind, weight in self._weights.items():
            self._due[kind] += weight
        chosen = max(self._due, key=self._due.__getitem__)
        self._due[chosen] -= sum(self._weights.values())
        return self._passes[chosen].next()

    def state(self) -> dict[str, Json]:
        return {"due": dict(self._due), "passes": {kind: passes.state() for kind, passes in self._passes.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for the state of other kinds."""
        due = state.get("due", {})
        if due.keys() != self._due.keys():
            raise ConfigError(
                f"the checkpoint was saved with tasks drawn by the kinds {', '.join(due) or '(none)'}, and they are "
                f"{', '.join(self._due)} now; leave curriculum.args.weights as they were, or begin another run.dir"
            )
        self._due = dict(due)
        for kind, passes in self._passes.items():
            passes.restore(state["passes"][kind])
