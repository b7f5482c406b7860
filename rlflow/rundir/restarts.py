"""How often a run goes on, from its last checkpoint, after it lost what it cannot do without."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rlflow.errors import PayloadLost, WorkerLost

MAX_RESTARTS = 3
"""In a row, with no newer checkpoint in between."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setback:
    """What a run has to make up for."""

    step: int
    """Steps that were done."""
    at_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self.at_s


def larger_setback(before: Setback | None, num_steps: int) -> Setback:
    """What is lost when a run that makes up for `before` is lost after `num_steps` steps: the one that went further."""
    return before if before is not None and before.step > num_steps else Setback(step=num_steps)


class Restarts:
    """The restarts of one process."""

    def __init__(self, saved_step: int) -> None:
        """`saved_step` is that of the checkpoint that the process began with, 0 without one."""
        self._saved_step = saved_step
        self._in_a_row = 0

    def count(self, error: WorkerLost | PayloadLost, saved_step: int) -> int:
        """The number of the restart that follows, since the newest checkpoint; raises `error` when there is none."""
        self._in_a_row = 1 if saved_step > self._saved_step else self._in_a_row + 1
        self._saved_step = saved_step
        if self._in_a_row > MAX_RESTARTS:
            error.add_note(
                f"the run was started again {MAX_RESTARTS} times from step {saved_step}, and never got as far as its "
                "next checkpoint; lower run.checkpoint_every if it dies of something else each time"
            )
            raise error
        return self._in_a_row
