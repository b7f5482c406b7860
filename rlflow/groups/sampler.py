"""Which task comes next: the tasks that were put back, then what the curriculum draws.

    curriculum -> next -> a group is played -> on_result -> curriculum
                   ^-------- put_back --------+
                   +-- recall <--- defer -----+

Rule: whatever a curriculum does, a task that is put back comes again, and so does one that is deferred.
"""

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.config import CurriculumConfig
from rlflow.curriculum.registry import make_curriculum
from rlflow.errors import ConfigError, describe_failure
from rlflow.types import Task

ROW_DIGITS = 16
_NAMED = 5
"""Tasks that a message names."""
_as_text = json.JSONEncoder(skipkeys=True, default=repr).encode
"""What JSON does not have reaches no environment, so that any text will do for it."""


@dataclass(kw_only=True, slots=True)
class SamplerState:
    """What a checkpoint keeps of the sampler."""

    kind: str
    """curriculum.kind, as in the settings."""
    tasks: str
    """A digest of the tasks' ids in their order."""
    rows: str
    """A digest of each task, `ROW_DIGITS` hexadecimal digits, in their order."""
    put_back: list[tuple[str, int]]
    """(task id, pass) of the tasks to try again, in order."""
    curriculum: dict[str, Any]
    """The curriculum's own state, as JSON."""
    deferred: list[tuple[str, int]] = field(default_factory=list)
    """(task id, pass) of the tasks that wait for `recall`, in order."""


def digests_of_rows(tasks: Sequence[Task]) -> str:
    """`SamplerState.rows` of these tasks: whatever an environment or a reward can see of each."""
    texts = (_as_text(_columns(task)) for task in tasks)
    return "".join(hashlib.sha256(text.encode()).hexdigest()[:ROW_DIGITS] for text in texts)


def _columns(task: Task) -> list[Any]:
    return [task.prompt, task.answer, task.kind, task.data, *task.demonstrations]


class TaskSampler:
    """All that the intake knows of the curriculum."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, config: CurriculumConfig | None = None, rows: str | None = None
    ) -> None:
        """`config` None is the uniform curriculum, and `rows` None digests the tasks. Raises ConfigError for a
        curriculum that does not exist, or not for these tasks, or cannot be saved."""
        assert tasks, "the environment loader rejects an empty task list"
        config = config or CurriculumConfig()
        self._kind = config.kind
        self._tasks = {task.id: task for task in tasks}
        digest = hashlib.sha256()
        for task in tasks:
            digest.update(task.id.encode() + b"\0")
        self._digest = digest.hexdigest()
        self.rows = digests_of_rows(tasks) if rows is None else rows
        self._curriculum = make_curriculum(config, tasks, seed)
        self._put_back: deque[tuple[str, int]] = deque()
        self._deferred: deque[tuple[str, int]] = deque()
        _ = self.state  # fails here rather than at the first checkpoint

    def next(self) -> tuple[Task, int | None]:
        """(task, the pass that it counts for); the pass is None for a newly drawn task, which begins its next one."""
        if self._put_back:
            task_id, task_pass = self._put_back.popleft()
            return self._tasks[task_id], task_pass
        task = self._curriculum.next()
        if not isinstance(task, Task) or task.id not in self._tasks:
            raise ConfigError(f"next() of curriculum.kind={self._kind} must return one of the tasks; got {task!r:.80}")
        return task, None

    def task(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def put_back(self, task_id: str, task_pass: int) -> None:
        """Offer this task again before any new one."""
        self._put_back.append((task_id, task_pass))

    @property
    def num_put_back(self) -> int:
        return len(self._put_back)

    def defer(self, task_id: str, task_pass: int) -> None:
        """Offer this task again when `recall` has put it back."""
        self._deferred.append((task_id, task_pass))

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def recall(self, count: int) -> None:
        """Put back deferred tasks until `count` tasks are put back, or none is deferred."""
        while self._deferred and len(self._put_back) < count:
            self._put_back.append(self._deferred.popleft())

    def on_result(self, task_id: str, rewards: Sequence[float]) -> None:
        """A group was scored; see `Curriculum.on_result`."""
        self._curriculum.on_result(task_id, rewards)

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/{name}": value for name, value in self._curriculum.metrics().items()}

    @property
    def state(self) -> SamplerState:
        """A copy. Raises ConfigError when the curriculum returns what JSON does not have."""
        try:
            curriculum = json.loads(json.dumps(self._curriculum.state(), allow_nan=False))
        except Exception as error:
            problem = describe_failure(error)
            raise ConfigError(f"state() of curriculum.kind={self._kind} must return JSON values: {problem}") from error
        return SamplerState(
            kind=self._kind,
            tasks=self._digest,
            rows=self.rows,
            put_back=list(self._put_back),
            curriculum=curriculum,
            deferred=list(self._deferred),
        )

    def edited(self, state: SamplerState) -> str:
        """Which rows are not what they were when `state` was saved, for a person; empty when all are.

        `state` must be one that `restore` takes.
        """
        of_row = {task_id: slice(row * ROW_DIGITS, (row + 1) * ROW_DIGITS) for row, task_id in enumerate(self._tasks)}
        found = [f"{task_id!r}" for task_id, where in of_row.items() if state.rows[where] != self.rows[where]]
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"{len(found)} of {len(self._tasks)} tasks ({', '.join(found[:_NAMED])}{more})" if found else ""

    def restore(self, state: SamplerState) -> None:
        """Raises ConfigError for the state of another curriculum, or of other tasks."""
        if state.kind != self._kind:
            raise ConfigError(
                f"curriculum.kind is {self._kind}, but the checkpoint was saved with {state.kind}; set it to that, or "
                "begin another run.dir"
            )
        if state.tasks != self._digest:
            raise ConfigError(
                f"the checkpoint was saved with other tasks than the {len(self._tasks)} that env.name and env.args "
                "give now, or in another order; restore the data that the run was begun with, or begin another run.dir"
            )
        self._curriculum.restore(state.curriculum)
        self._put_back, self._deferred = deque(state.put_back), deque(state.deferred)
