"""Each task once a pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rlflow.curriculum.base import Curriculum
from rlflow.types import Json, Task


class Passes:
    """Endless passes over the numbers below `size`; each pass has its own order, fixed by (seed, pass)."""

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._seed = seed
        self._pass = 0
        self._position = 0
        self._order = self._shuffled()

    def next(self) -> int:
        if self._position == self._size:
            self._pass += 1
            self._position = 0
            self._order = self._shuffled()
        self._position += 1
        return self._order[self._position - 1]

    def state(self) -> dict[str, Json]:
        return {"pass": self._pass, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._pass, self._position = state["pass"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(self._size))
        random.Random(f"{self._seed}/{self._pass}").shuffle(order)
        return order


class Uniform(Curriculum):
    """Endless passes over the tasks, each in an order of its own."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._passes = Passes(len(tasks), str(seed))

    def next(self) -> Task:
        return self._tasks[self._passes.next()]

    def state(self) -> dict[str, Json]:
        return self._passes.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._passes.restore(state)
