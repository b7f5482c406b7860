"""A job's log as it is written, up to the job's end, through lost connections."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from ray.job_submission import JobDetails, JobStatus

from rlflow.errors import RunError, first_line
from rlflow.tools.submit.ray_client import UNREACHABLE


class Jobs(Protocol):
    """What is used here of Ray's client."""

    def get_job_info(self, job_id: str) -> JobDetails: ...

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Waits:
    """Seconds."""

    retry_s: float = 3.0
    give_up_s: float = 300.0
    """How long the cluster may not answer at all."""
    quiet_s: float = 30.0
    """After so long without new lines we ask whether the cluster is still there."""
    reconnect_s: float = 300.0
    """After so long without new lines the log is asked for anew, because connections are dropped without a word."""


_UNREAD = 2
"""After so many failures in a row to read a log, we say so."""


class _NothingComes(ConnectionError):
    """The log may be dead, or have nothing to say."""


class ConnectionLost(RunError):
    """The cluster did not answer for too long; this says nothing about the job."""


class Follower:
    """Follows one job.

    `show` is given its log, but for the first `shown` characters; `tell` what else a person should know.
    """

    def __init__(
        self,
        jobs: Jobs,
        name: str,
        show: Callable[[str], None],
        tell: Callable[[str], None],
        *,
        shown: int = 0,
        waits: Waits | None = None,
    ) -> None:
        self._jobs = jobs
        self._name = name
        self._show = show
        self._tell = tell
        self._shown = shown
        self._waits = waits or Waits()
        self._unread = 0
        """How often in a row the log broke off before its first line."""

    async def wait_until_ended(self) -> JobDetails:
        """How the job ended; its log has been shown by then.

        Raises ConnectionLost, and UnknownJob when the cluster answers but has no such job, as after its head was
        started anew.
        """
        clock = asyncio.get_running_loop().time
        answered_s, is_lost, ended = clock(), False, False
        while True:
            problem = await self._read_log()
            try:
                details = await self._details()
                if details.status.is_terminal() and (ended or problem is None):
                    return details
                ended = details.status.is_terminal()  # then once more, for the rest of the log
                answered_s, is_lost = clock(), False
                if details.status is JobStatus.RUNNING and self._unread == _UNREAD:
                    self._tell(f"the job runs, but its log cannot be read ({problem}); trying again")
            except UNREACHABLE as error:
                if clock() - answered_s > self._waits.give_up_s:
                    reason = first_line(error)
                    raise ConnectionLost(f"no answer for {self._waits.give_up_s:g} s: {reason}") from error
                if not is_lost:
                    self._tell(f"no connection to the cluster ({first_line(error)}); trying again")
                is_lost = True
            await asyncio.sleep(self._waits.retry_s)

    async def _details(self) -> JobDetails:
        return await asyncio.to_thread(self._jobs.get_job_info, self._name)

    async def _read_log(self) -> str | None:
        """Show what is new until the log ends; why it broke off, None when it did not."""
        lines, seen = self._jobs.tail_job_logs(self._name), 0  # from its beginning, each time
        try:
            while True:
                try:
                    text = await self._next(lines)
                except RunError:
                    raise
                except (*UNREACHABLE, RuntimeError) as error:  # the latter is Ray's client's for a broken connection
                    self._unread = 0 if seen or isinstance(error, _NothingComes) else self._unread + 1
                    return first_line(error)
                if text is None:
                    return None
                if new := text[max(self._shown - seen, 0) :]:
                    self._show(new)
                seen += len(text)
                self._shown = max(self._shown, seen)
        finally:
            if isinstance(lines, AsyncGenerator):
                await lines.aclose()

    async def _next(self, lines: AsyncIterator[str]) -> str | None:
        """The next lines; None at the end."""
        coming = asyncio.ensure_future(anext(lines, None))
        try:
            quiet_s = 0.0
            while not (await asyncio.wait([coming], timeout=self._waits.quiet_s))[0]:
                quiet_s += self._waits.quiet_s
                if (await self._details()).status.is_terminal() or quiet_s >= self._waits.reconnect_s:
                    raise _NothingComes("nothing comes any more")
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])
