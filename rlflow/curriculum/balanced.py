"""Equally many tasks of each kind (task-balanced sampling, QwenLong-L1.5, arXiv:2512.12967)."""

from collections.abc import Sequence
from typing import Any

from rlflow.curriculum.base import Curriculum
from rlflow.curriculum.uniform import Uniform
from rlflow.errors import ConfigError
from rlflow.types import Json, Task


class Balanced(Curriculum):
    """The kinds in turn, whatever their sizes; within a kind, shuffled passes."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Raises ConfigError if all tasks are of one kind."""
        of_kind: dict[str, list[Task]] = {}
        for task in tasks:
            of_kind.setdefault(task.kind, []).append(task)
        self._kinds = list(of_kind)
        if len(self._kinds) < 2:
            raise ConfigError(
                f"curriculum.kind=balanced has no effect where all {len(tasks)} tasks are of one kind, "
                f"{self._kinds[0]!r}; give them kinds (Task.kind), or set it to uniform"
            )
        self._passes = {kind: Uniform(those, f"{seed}/{kind}") for kind, those in of_kind.items()}
        self._turn = 0

    def next(self) -> Task:
        kind = self._kinds[self._turn]
        self._turn = (self._turn + 1) % len(self._kinds)
        return self._passes[kind].next()

    def state(self) -> dict[str, Json]:
        return {"turn": self._turn, "passes": {kind: passes.state() for kind, passes in self._passes.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self._turn = state["turn"]
        for kind, passes in self._passes.items():
            passes.restore(state["passes"][kind])
