"""Each task once a pass."""

import random
from collections.abc import Sequence
from typing import Any

from rlflow.curriculum.base import Curriculum
from rlflow.types import Json, Task


class Uniform(Curriculum):
    """Endless passes over the tasks; each pass has its own order, fixed by (seed, pass)."""

    def __init__(self, tasks: Sequence[Task], seed: int | str) -> None:
        """`seed` may be a text: other curricula pass over parts of the tasks, each part in an order of its own."""
        self._tasks = tasks
        self._seed = seed
        self._pass = 0
        self._position = 0
        self._order = self._shuffled()

    def next(self) -> Task:
        if self._position == len(self._tasks):
            self._pass += 1
            self._position = 0
            self._order = self._shuffled()
        self._position += 1
        return self._tasks[self._order[self._position - 1]]

    def state(self) -> dict[str, Json]:
        return {"pass": self._pass, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._pass, self._position = state["pass"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{self._pass}").shuffle(order)
        return order
