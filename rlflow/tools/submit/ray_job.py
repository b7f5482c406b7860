"""A run as a job of a Ray cluster, through the job API of its dashboard: start it, show its log to its end, stop it."""

import asyncio
import math
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus

from rlflow.config import Config
from rlflow.errors import ConfigError, RunError, first_line
from rlflow.rundir.lock import seconds_to_stop
from rlflow.tools.submit.command_words import INTERRUPTED, LOST, STOPPED, Job, how_to_go_on, where
from rlflow.tools.submit.package import Package, describe, write
from rlflow.tools.submit.ray_client import UNREACHABLE, JobClient, UnknownJob, open_client, understood

_NOT_FOUND = 127
"""The exit code of a shell that finds no such command."""
_RUN_DIR = "run.dir"
_STOP_S = "seconds_to_stop"


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


@dataclass(slots=True)
class Follower:
    """Follows one job through lost connections."""

    jobs: Jobs
    name: str
    show: Callable[[str], None]
    """Given the log as it is written."""
    tell: Callable[[str], None]
    """Given what else a person should know."""
    shown: int = 0
    """Characters of the log that have been shown."""
    waits: Waits = Waits()
    _unread: int = 0
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
                details = await asyncio.to_thread(self.jobs.get_job_info, self.name)
                if details.status.is_terminal() and (ended or problem is None):
                    return details
                ended = details.status.is_terminal()  # then once more, for the rest of the log
                answered_s, is_lost = clock(), False
                if details.status is JobStatus.RUNNING and self._unread == _UNREAD:
                    self.tell(f"the job runs, but its log cannot be read ({problem}); trying again")
            except UNREACHABLE as error:
                if clock() - answered_s > self.waits.give_up_s:
                    reason = first_line(error)
                    raise ConnectionLost(f"no answer for {self.waits.give_up_s:g} s: {reason}") from error
                if not is_lost:
                    self.tell(f"no connection to the cluster ({first_line(error)}); trying again")
                is_lost = True
            await asyncio.sleep(self.waits.retry_s)

    async def _read_log(self) -> str | None:
        """Show what is new until the log ends; why it broke off, None when it did not."""
        lines, seen = self.jobs.tail_job_logs(self.name), 0  # from its beginning, each time
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
                if new := text[max(self.shown - seen, 0) :]:
                    self.show(new)
                seen += len(text)
                self.shown = max(self.shown, seen)
        finally:
            if isinstance(lines, AsyncGenerator):
                await lines.aclose()

    async def _next(self, lines: AsyncIterator[str]) -> str | None:
        """The next lines; None at the end."""
        coming = asyncio.ensure_future(anext(lines, None))
        try:
            quiet_s = 0.0
            while not (await asyncio.wait([coming], timeout=self.waits.quiet_s))[0]:
                quiet_s += self.waits.quiet_s
                if (
                    await asyncio.to_thread(self.jobs.get_job_info, self.name)
                ).status.is_terminal() or quiet_s >= self.waits.reconnect_s:
                    raise _NothingComes("nothing comes any more")
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])


class RayJobs:
    """The jobs of the cluster at cluster.address. Raises ConfigError when that is not the address of a dashboard."""

    def __init__(self, config: Config) -> None:
        address = config.cluster.address or ""
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"cluster.address={address} is for runs on the cluster itself; to submit a job, give the address of "
                "its dashboard, such as cluster.address=http://127.0.0.1:8265"
            )
        self._address = address.rstrip("/")
        self._where = where(config.cluster)
        self._stop_s = math.ceil(seconds_to_stop(config.deadlines))

    def plan(self, job: Job, package: Package) -> str:
        """What `start` would ask for, as YAML."""
        asked = {
            "address": self._address,
            "job": job.name,
            "run_dir": job.run_dir,
            **self._asked(job, describe(package) if package else None),
        }
        return yaml.safe_dump(asked, sort_keys=False, width=10_000)

    def start(self, job: Job, package: Package) -> None:
        """Send the code and start the job.

        Raises ConfigError when the cluster does not take it, MaybeStarted when it does not say so.
        """
        client = self._client
        with understood(self._address), tempfile.TemporaryDirectory() as folder:
            archive = None
            if package:
                archive = Path(folder) / "package.zip"
                write(package, archive)
            client.submit_job(
                submission_id=job.name,
                metadata={_RUN_DIR: job.run_dir, _STOP_S: str(self._stop_s)},
                **self._asked(job, None if archive is None else str(archive)),
            )

    def stop(self, name: str) -> int:
        """Have a job finish its step, save and end, and wait for that; exit code 0 when it has ended so."""
        shown, client = 0, self._client
        with understood(self._address):
            details = client.get_job_info(name)
            if not details.status.is_terminal():
                shown = len(client.get_job_logs(name))
                client.stop_job(name)
        if details.status.is_terminal():
            print(f"job {name} had already ended: {details.status.value}")
            return 0
        _tell(f"job {name} finishes its step and saves; Ctrl-C leaves it to that")
        code = self.follow(name, shown=shown, seconds=float((details.metadata or {}).get(_STOP_S, self._stop_s)))
        return 0 if code == STOPPED else code

    def follow(self, name: str, *, shown: int = 0, seconds: float | None = None) -> int:
        """Show a job's log, but for the first `shown` characters, until it ends.

        Exit code: its own, LOST, or 0 after Ctrl-C, when it goes on. RunError when it takes longer than `seconds`.
        """
        follower = Follower(self._client, name, _show, _tell, shown=shown)
        try:
            details = asyncio.run(asyncio.wait_for(follower.wait_until_ended(), seconds))
        except KeyboardInterrupt:
            _tell(f"\nthe job goes on\n{how_to_go_on(name, self._where)}")
            return 0
        except TimeoutError:
            raise RunError(f"job {name} has not ended within {seconds:g} s; Ray kills it about now") from None
        except (ConnectionLost, AuthenticationError) as error:
            _tell(
                f"{first_line(error)}; whether the job goes on is not known: it does if only the way to the cluster is "
                "cut, and it has ended if Ray's head (its gcs_server) has; then submit again with the same run.dir to "
                f"go on after the last checkpoint\n{how_to_go_on(name, self._where)}"
            )
            return LOST
        except UnknownJob as error:
            raise RunError(
                f"{error}: its head may have been started anew, and its jobs ended with it; submit again with the same "
                "run.dir to go on after the last checkpoint"
            ) from error
        return tell_end(details)

    @cached_property
    def _client(self) -> JobClient:
        return open_client(self._address)

    def _asked(self, job: Job, package: str | None) -> dict[str, Any]:
        # Ray kills what has not ended after so many seconds, 3 by default; its supervisor of the job reads it.
        environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(self._stop_s)}}
        if package is not None:
            environment["working_dir"] = package
        # `exec`, because signals must meet the driver and no shell.
        return {"entrypoint": f"exec {shlex.join(job.words)}", "runtime_env": environment}


def tell_end(details: JobDetails) -> int:
    """Tell how a job ended; its exit code."""
    name, run_dir = details.submission_id, (details.metadata or {}).get(_RUN_DIR)
    if details.status is JobStatus.SUCCEEDED:
        _tell(f"job {name} succeeded: {run_dir}")
        return 0
    again = f"submit again with run.dir={run_dir} to go on after its last checkpoint"
    code = details.driver_exit_code
    if details.status is JobStatus.STOPPED or code in (INTERRUPTED, STOPPED):
        _tell(f"job {name} was stopped; {again}")
        return code or STOPPED
    if code is None:  # Ray could not start it, or lost it
        _tell(f"job {name} failed; {again}\n{details.message}")
        return 1
    ended_by = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    if code == _NOT_FOUND:
        ended_by += ", as of no such command: `python` must be on the PATH of the cluster's Ray processes"
    _tell(f"job {name} failed {ended_by}; the lines above say why; {again}")
    return 128 - code if code < 0 else code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(text: str) -> None:
    print(f"rlflow: {text}" if not text.startswith("\n") else text, file=sys.stderr, flush=True)
