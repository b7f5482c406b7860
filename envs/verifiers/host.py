"""The process that runs a verifiers environment, seen from here.

One for each environment and event loop, which plays many rollouts at a time; it ends when its standard input is closed,
so at the latest with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rlflow.errors import ConfigError, DeadlineError

START_TIMEOUT_S = 300.0
"""Seconds for an environment to be imported and to read its data."""
CLOSE_TIMEOUT_S = 30.0
MAX_LINE_BYTES = 64 * 2**20
RUNNER = str(Path(__file__).parent / "runner.py")


class VerifiersError(Exception):
    """The environment, its rubric or its process failed; the episode has no verdict."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """Which environment."""

    id: str
    args: str
    """JSON."""
    python: str
    """Path of the interpreter that has verifiers."""

    def command(self, verb: str, **more: Any) -> list[str]:
        # -P: not the folder of the runner, whose files have names that a user's may have too.
        asked = {"id": self.id, "args": json.loads(self.args), **more}
        return [self.python, "-P", RUNNER, verb, json.dumps(asked)]


@lru_cache(maxsize=8)
def rows_of(source: Source, size: int, evaluation_size: int) -> dict[str, Any]:
    """The data sets `train` and `eval`; `eval` is None if there is none. A size of -1 means all rows. Blocking.

    Raises ConfigError when the environment cannot be loaded.
    """
    command = source.command("rows", size=size, evaluation_size=evaluation_size)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except OSError as error:
        raise ConfigError(f"env.args.python={source.python} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"loading of the verifiers environment {source.id}", START_TIMEOUT_S) from error
    if done.returncode or not done.stdout:
        raise ConfigError(f"env.args.id={source.id}: the process that loads it failed: {done.stderr[-500:]}")
    answer = json.loads(done.stdout)
    if "fatal" in answer:
        raise ConfigError(f"env.args.id={source.id}: {_with_hint(answer['fatal'], source)}")
    return answer


class Host:
    """Started with `start`; `ask` may be called many times at once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._process: asyncio.subprocess.Process
        self._listening: asyncio.Task[None]
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()

    async def start(self) -> Host:
        """Raises VerifiersError if the environment cannot be loaded, DeadlineError if that takes too long."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._source.command("serve"), stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await self._process.stdout.readline()
        except BaseException as error:
            self._process.kill()
            if isinstance(error, TimeoutError):
                stage = f"loading of the verifiers environment {self._source.id}"
                raise DeadlineError(stage, START_TIMEOUT_S) from error
            raise
        greeting = json.loads(first) if first else {"fatal": "the process ended while it loaded the environment"}
        if "fatal" in greeting:
            raise VerifiersError(_with_hint(greeting["fatal"], self._source))
        self._listening = asyncio.create_task(self._listen())
        return self

    @property
    def is_alive(self) -> bool:
        return not self._listening.done()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one rollout, which is cancelled when the wait for it is. Raises VerifiersError."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **request})
            outcome = await answer
        except asyncio.CancelledError:
            if self.is_alive:
                with contextlib.suppress(VerifiersError):
                    await self._send({"cancel": number})
            raise
        finally:
            self._open.pop(number, None)
        if "error" in outcome:
            raise VerifiersError(outcome["error"])
        return outcome

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.wait((self._listening,))

    async def _send(self, message: dict[str, Any]) -> None:
        if not self.is_alive:
            raise VerifiersError(self._epitaph())
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise VerifiersError(self._epitaph()) from error

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                waiting = self._open.get(message["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        finally:
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_result({"error": self._epitaph()})

    def _epitaph(self) -> str:
        return f"the process of the verifiers environment {self._source.id} died"


_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Source, asyncio.Task[Host]]] = WeakKeyDictionary()


async def host_of(source: Source) -> Host:
    """The running process of an environment. The first caller starts it; it is started again after it died.

    Raises VerifiersError and DeadlineError as `Host.start` does.
    """
    hosts = _hosts.setdefault(asyncio.get_running_loop(), {})
    starting = hosts.get(source)
    if starting is not None and starting.done():
        has_failed = starting.cancelled() or starting.exception() is not None
        starting = None if has_failed or not starting.result().is_alive else starting
    if starting is None:
        starting = hosts[source] = asyncio.create_task(Host(source).start())
    return await asyncio.shield(starting)


async def close_hosts() -> None:
    """End the processes that belong to this event loop."""
    for starting in _hosts.pop(asyncio.get_running_loop(), {}).values():
        await (await starting).close()


def _with_hint(message: str, source: Source) -> str:
    if "No module named 'verifiers'" not in message:
        return message
    return f"{source.python} (env.args.python) has no verifiers; pip install 'verifiers>=0.3.1,<0.4' there"
