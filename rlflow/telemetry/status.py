"""status.json: what a run does now, for `rlflow status` on any machine that sees the run's directory.

The driver's loop writes it every few seconds from the start of the workers to their end, so that its age says whether
the driver lives.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlflow.errors import RunError
from rlflow.runtime.disk import write_whole

NAME = "status.json"
EVERY_S = 5.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Status:
    """What was written last. Times are seconds since the epoch."""

    written_s: float
    phase: str
    phase_since_s: float
    doing: list[str] = field(default_factory=list)
    """What each part of the run does, and what it waits for, a line each; empty before training begins."""


class StatusFile:
    """The writer. What cannot be written is told once and then left: training does not need it."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = run_dir / NAME, tell
        self._phase, self._since_s = "", time.time()
        self.describe: Callable[[], str] = str
        """What each part of the run does; set while there are parts."""
        self._is_off = False
        self._path.unlink(missing_ok=True)  # of an earlier start

    def phase(self, name: str) -> None:
        """What the run does from now on."""
        if name != self._phase:
            self._phase, self._since_s = name, time.time()
            self._write()

    async def keep(self) -> None:
        """Write it again and again, until cancelled."""
        while not self._is_off:
            self._write()
            await asyncio.sleep(EVERY_S)

    def _write(self) -> None:
        if self._is_off:
            return
        status = Status(
            written_s=time.time(),
            phase=self._phase,
            phase_since_s=self._since_s,
            doing=self.describe().splitlines(),
        )
        try:
            write_whole(self._path, json.dumps(asdict(status)), NAME)
        except (OSError, RunError) as error:
            self._is_off = True
            self._tell(
                f"`rlflow status` knows nothing more of this run, because {self._path} cannot be written: {error}"
            )


def read_status(run_dir: Path) -> Status | None:
    """None for a run that has written none. Raises RunError for a file that is not ours."""
    path = run_dir / NAME
    if not path.exists():
        return None
    try:
        return Status(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} does not hold the status of a run ({error}); delete it") from error
