"""What a curriculum is.

Yours is a class below `Curriculum`, named by `curriculum.kind=package.module:Class` or `file.py:Class` and built in the
driver as `Class(tasks, seed, **options)`; its options, keyword-only parameters, are set by `curriculum.args`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlflow.types import Json, Task


class Curriculum(ABC):
    """Which task is drawn next. Tasks that must be tried again come before, without being asked for here.

    All methods run on the driver's event loop: none may take long. What one raises ends the run.
    """

    @abstractmethod
    def next(self) -> Task:
        """One of the tasks; the same again whenever it likes, also before the result of an earlier draw is known."""

    def on_result(self, task_id: str, rewards: Sequence[float]) -> None:  # noqa: B027  optional
        """A group of this task was scored: the rewards of its episodes, without those that have no verdict.

        Called once for each group that was scored, trained or not; `rewards` is empty when none has a verdict.
        """

    def metrics(self) -> dict[str, float]:
        """Numbers for the record of a step, which calls them curriculum/<name>."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Json]:
        """All that `restore` needs, as JSON: a checkpoint keeps it."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave; the tasks, their order and the seed are the same."""
