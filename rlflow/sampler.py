"""Which task comes next: a seeded shuffle a pass, and before it the tasks that were put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.types import Task


@dataclass(kw_only=True, slots=True)
class SamplerState:
    """What a checkpoint keeps of the sampler."""

    task_pass: int
    position: int
    """Index into the shuffled order of `task_pass` of the next task."""
    put_back: list[tuple[str, int]]
    """(task id, pass) of the tasks to try again, in order."""


class TaskSampler:
    """Endless passes over the tasks; each pass has its own order, fixed by (seed, pass)."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        assert tasks, "the environment loader rejects an empty task list"
        self._tasks = tasks
        self._index = {task.id: index for index, task in enumerate(tasks)}
        self._seed = seed
        self._pass = 0
        self._position = 0
        self._order = self._shuffled(0)
        self._put_back: deque[tuple[str, int]] = deque()

    def next(self) -> tuple[Task, int]:
        """(task, the pass that it counts for)."""
        if self._put_back:
            task_id, task_pass = self._put_back.popleft()
            return self._tasks[self._index[task_id]], task_pass
        if self._position == len(self._order):
            self._pass += 1
            self._position = 0
            self._order = self._shuffled(self._pass)
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return task, self._pass

    def put_back(self, task_id: str, task_pass: int) -> None:
        """Offer this task again before any new one."""
        self._put_back.append((task_id, task_pass))

    @property
    def state(self) -> SamplerState:
        return SamplerState(task_pass=self._pass, position=self._position, put_back=list(self._put_back))

    def restore(self, state: SamplerState) -> None:
        self._pass = state.task_pass
        self._order = self._shuffled(self._pass)
        self._position = state.position
        self._put_back = deque((task_id, task_pass) for task_id, task_pass in state.put_back)

    def _shuffled(self, task_pass: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{task_pass}").shuffle(order)
        return order
