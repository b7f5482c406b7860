"""How often a run goes on from its newest checkpoint, after losing a process that it cannot do without."""

import time
from dataclasses import dataclass, field

from rlflow.errors import PayloadLost, WorkerLost

MAX_RESTARTS = 3
"""In a row, with no newer checkpoint in between."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setback:
    """Steps that must be done again after a process or machine was lost."""

    step: int
    """Steps that were done at the loss."""
    at_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the loss."""
        return time.monotonic() - self.at_s


def larger_setback(before: Setback | None, num_steps: int) -> Setback:
    """What a run must make up for that is lost after `num_steps` steps, while it still made up for `before`."""
    return before if before is not None and before.step > num_steps else Setback(step=num_steps)


class Restarts:
    """The restarts of one process."""

    def __init__(self, saved_step: int) -> None:
        """`saved_step` is the step of the checkpoint that the process began with, 0 without one."""
        self._saved_step = saved_step
        self._in_a_row = 0

    def count(self, error: WorkerLost | PayloadLost, saved_step: int) -> int:
        """The number of the next restart since the newest checkpoint; raises `error` when there must be none."""
        self._in_a_row = 1 if saved_step > self._saved_step else self._in_a_row + 1
        self._saved_step = saved_step
        if self._in_a_row > MAX_RESTARTS:
            error.add_note(
                f"the run was started again {MAX_RESTARTS} times from step {saved_step}, and never got as far as its "
                "next checkpoint; lower run.checkpoint_every if it dies of something else each time"
            )
            raise error
        return self._in_a_row
