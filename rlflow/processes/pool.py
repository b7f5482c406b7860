"""Processes that run other people's code, may be killed at any time, and are replaced when they end.

    Pool -> HostedProcess -> rlflow.processes.supervisor -> rlflow.processes.host -> the code

Both ends talk in frames (`rlflow.processes.frames`) over a socket that only they hold.

A call that raises fails by itself. When its process dies, or is killed because a call overran, every call under way in
it fails with the reason, such as "the scoring process was killed by SIGSEGV".
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import cloudpickle

from rlflow.errors import ConfigError, DeadlineError
from rlflow.processes.frames import MAX_FRAME_BYTES, Fields, check_size, encode, frame_of, read_frame
from rlflow.runtime import scratch

START_TIMEOUT_S = 120.0
"""How long a process may take to start and load its code."""
KILL_TIMEOUT_S = 10.0
MAX_RESTART_WAIT_S = 60.0
CLUSTER_KEYS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})
"""Variables with the keys of a Ray cluster. No process here inherits them, because a program may show its variables to
a model."""
_numbers = itertools.count()


class CallFailed(Exception):
    """The code raised; the text says what and where."""


class ProcessLost(Exception):
    """The process ended before it had answered; the text says how."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostedCode:
    """What a process loads, and how messages speak of it."""

    module: str
    """Its `load` makes handlers of the content; see `rlflow.processes.host`."""
    payload: bytes
    """The content, as `payload_of` pickles it."""
    process: str
    """Such as "the scoring process"."""
    what: str
    """Such as "the environment"; messages say that it "cannot be loaded in the environment process"."""
    cure: str
    """What to do about that, such as "define it at the top level of an importable module"."""
    answer: str = "JSON"
    """What an answer is, such as "verdict"."""
    max_answer_bytes: int = MAX_FRAME_BYTES
    max_memory_bytes: int = 0
    """The bound on each process; 0 is none."""
    failed: type[Exception] = CallFailed
    lost: type[Exception] = ProcessLost


def payload_of(content: object, what: str, process: str, cure: str) -> bytes:
    """`content`, pickled: code that can be imported by its name, that of a script or notebook as it is.

    Raises ConfigError: `what` cannot be sent to `process`, the reason, and the cure.
    """
    try:
        payload = cloudpickle.dumps(content)
        check_size(len(payload))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be sent to {process}: {error}; {cure}") from error
    return payload


class Call:
    """One call of an operation, and what becomes of it."""

    def __init__(self, operation: str, read: Callable[[Any], Any] = lambda value: value, /, **fields: object) -> None:
        """`read` makes the result of the value that the process answers with.

        Raises TypeError, ValueError or RecursionError for fields that cannot be sent.
        """
        self.number = next(_numbers)
        self.operation = operation
        self.content = encode({"call": self.number, "operation": operation, **fields})
        check_size(len(self.content))
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_answered = False
        """By the process, rather than given up."""
        self._read = read

    def settle(self, value: Any) -> None:
        """Raises what `read` does."""
        self.is_answered = True
        if not self.result.done():
            self.result.set_result(self._read(value))

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class HostedProcess:
    """One process, from its start to its end. Its calls are answered one after the other."""

    def __init__(self, code: HostedCode) -> None:
        """Start the process; `start` waits for it."""
        self._code = code
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._calls: dict[int, Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._lost = ""
        self._ending: asyncio.Task[int] | None = None
        """Kills the process and waits for its end, once that was asked for."""
        self.refuses = asyncio.Event()
        """Set when the process should get no further calls, and be replaced."""
        self.ended = asyncio.Event()
        """Set when the process and all that it started are gone."""
        ours, theirs = socket.socketpair()
        self._connection: socket.socket | asyncio.StreamWriter = ours
        life_read, self._life_fd = os.pipe()
        descriptors = (theirs.fileno(), life_read)
        scratch.folder()  # is named in the environment from here on
        variables = {name: value for name, value in os.environ.items() if name not in CLUSTER_KEYS}
        variables["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rlflow.processes.supervisor", *map(str, descriptors)),
                    *(code.module, str(code.max_memory_bytes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=variables,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._life_fd)
            raise
        finally:
            theirs.close()
            os.close(life_read)

    async def start(self) -> None:
        """Raises ConfigError when the code cannot be loaded, DeadlineError when that takes too long."""
        code = self._code
        try:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    assert isinstance(self._connection, socket.socket), "start once"
                    self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
                    self._connection = self._writer
                    self._send(code.payload)
                    await self._drain()
                    answer = json.loads(await read_frame(self._reader))
            except (EOFError, ConnectionError, ValueError) as error:
                death = await self._describe_death()
                raise ConfigError(f"{death} while it loaded {code.what}; its output may say why") from error
            except TimeoutError as error:
                hint = f"importing {code.what} takes too long"
                raise DeadlineError(f"start of {code.process}", START_TIMEOUT_S, hint) from error
            if "broken" in answer:
                raise ConfigError(f"{code.what} cannot be loaded in {code.process}: {answer['broken']}; {code.cure}")
            if "refused" in answer:
                raise ConfigError(answer["refused"])
        except BaseException:
            await asyncio.shield(self._end())
            raise
        self._spawn(self._listen())

    async def answer_to(self, call: Call) -> Any:
        """The result of a call; each is for one use.

        Raises the code's `failed` when the handler raised, its `lost` when the process ended. A process whose call is
        cancelled is killed.
        """
        if self._lost:
            raise self._code.lost(self._lost)
        self._send(call.content)
        self._calls[call.number] = call
        try:
            await self._drain()
            return await call.result
        finally:
            del self._calls[call.number]
            if not call.is_answered and not self._lost:
                self._abandon(call)

    def kill(self, reason: str) -> None:
        """End the process and all that it started; calls under way fail with the reason. Raises nothing."""
        self._lose(reason)
        self._end()

    async def retire(self) -> None:
        """Wait until a process that takes no further calls is gone."""
        await self.ended.wait()

    def _send(self, content: bytes) -> None:
        """Send without waiting; nothing happens when the process was killed. Raises FrameTooLong."""
        frame = frame_of(content)
        if self._ending is None:
            self._writer.write(frame)

    async def _drain(self) -> None:
        """Wait until the process has taken most of what was sent, or is gone."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def _end(self) -> asyncio.Task[int]:
        """Kill the process and all that it started, unless that was done; the task gives the exit code."""
        if self._ending is None:
            os.close(self._life_fd)
            self._ending = asyncio.create_task(self._wait_until_ended())
        return self._ending

    async def _wait_until_ended(self) -> int:
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = await asyncio.to_thread(self._process.wait, KILL_TIMEOUT_S)
                self._connection.close()  # not before: a process that reads its end might exit before it is killed
                return code
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        raise DeadlineError(f"end of {self._code.process}, which was killed", 2 * KILL_TIMEOUT_S)

    async def _describe_death(self) -> str:
        """How the process died; it was killed, or has closed its socket."""
        is_ours = self._ending is not None
        code = await asyncio.shield(self._end())
        if code >= 0:
            return f"{self._code.process} exited with code {code}"
        is_unexplained = -code == signal.SIGKILL and not is_ours
        hint = "; the kernel does that when memory runs out" if is_unexplained else ""
        return f"{self._code.process} was killed by {signal.Signals(-code).name}{hint}"

    def _abandon(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self.kill(f"{self._code.process} was killed, because {call.operation} was cancelled")

    def _take(self, message: Fields) -> None:
        """Handle one message of the process. Raises ValueError, LookupError or TypeError for nonsense."""
        call = self._calls.get(message["answer"])
        if call is not None and "failure" in message:
            call.is_answered = True
            call.fail(self._code.failed(message["failure"]))
        elif call is not None:
            call.settle(message["value"])

    def _lose(self, reason: str) -> None:
        """From here on, every call fails; the first reason counts."""
        if self._lost:
            return
        self._lost = reason
        self.refuses.set()
        for call in self._calls.values():
            call.fail(self._code.lost(reason))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _listen(self) -> None:
        """Take what the process sends, until it ends."""
        cause = ""
        try:
            while True:
                content = await read_frame(self._reader, self._code.max_answer_bytes)
                try:
                    self._take(json.loads(content))
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise ValueError(f"an answer that is no {self._code.answer}: {content[:80]!r}") from error
        except (EOFError, ConnectionError):
            self.refuses.set()
        except ValueError as error:
            self._end()
            cause = f", for it sent what it must not ({error})"
        try:
            self._lose(await self._describe_death() + cause)
        except DeadlineError as error:
            self._lose(str(error))
        self.ended.set()


P = TypeVar("P", bound=HostedProcess)
T = TypeVar("T")


class _Slot(Generic[P]):
    """The place of one process, and of those that replace it."""

    def __init__(self) -> None:
        self.keeping: asyncio.Task[None] | None = None
        self.process: P | None = None
        """The last one that could be started."""
        self.error: Exception | None = None
        """Why none could be started after it."""

    @property
    def open(self) -> P | None:
        """Its process, if that takes calls."""
        return None if self.process is None or self.process.refuses.is_set() else self.process


class Pool(Generic[P]):
    """A fixed number of processes, each replaced when it refuses further calls."""

    def __init__(self, make: Callable[[], P], size: int, closed: Callable[[], Exception]) -> None:
        """`closed` is raised to callers that wait for a process when the pool is closed."""
        self._make = make
        self._closed = closed
        self._slots = [_Slot[P]() for _ in range(size)]
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(size)
        self._busy: set[P] = set()
        self.living: dict[P, asyncio.Task[None]] = {}
        """Every process that is not yet gone, with the task that waits for its end."""

    async def start(self) -> None:
        """Start the processes, unless they are, and wait until each has loaded its code.

        Raises ConfigError when it cannot be loaded, DeadlineError when that takes too long.
        """
        async with self._starting:
            if self._slots[0].keeping is not None:
                return
            for slot in self._slots:
                slot.keeping = asyncio.create_task(self._keep(slot))
                slot.keeping.add_done_callback(lambda _: self._changed.set())
            try:
                await self._wait_until(lambda: all(slot.open or slot.error for slot in self._slots))
                self._raise_error()
            except BaseException:
                await self.close()
                raise

    async def pick(self, key: Callable[[P], float]) -> P:
        """The process with the least `key`, of those that take calls; waits for one however long it takes."""
        return min(await self._wait_until(lambda: [slot.open for slot in self._slots if slot.open]), key=key)

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[P]:
        """A process for one caller alone; the others wait. Raises the error of a process that could not start."""
        async with self._turns:
            process = await self._wait_until(self._find_idle)
            self._busy.add(process)
            try:
                yield process
            finally:
                self._busy.discard(process)
                self._changed.set()

    async def close(self) -> None:
        """Kill the processes and all that they started; what is under way fails."""
        slots, self._slots = self._slots, [_Slot[P]() for _ in self._slots]
        keeping = [slot.keeping for slot in slots if slot.keeping is not None]
        for task in keeping:
            task.cancel()
        for process in self.living:
            process.kill(str(self._closed()))
        await asyncio.gather(*keeping, *self.living.values(), return_exceptions=True)

    def _find_idle(self) -> P | None:
        for slot in self._slots:
            if slot.open and slot.open not in self._busy:
                return slot.open
        self._raise_error()

    def _raise_error(self) -> None:
        for slot in self._slots:
            if slot.error is not None:
                raise slot.error

    async def _wait_until(self, holds: Callable[[], T | None]) -> T:
        while not (found := holds()):
            for slot in self._slots:
                if slot.keeping is None or slot.keeping.cancelled():
                    raise self._closed()
                if slot.keeping.done():
                    slot.keeping.result()
            self._changed.clear()
            await self._changed.wait()
        return found

    async def _keep(self, slot: _Slot[P]) -> None:
        """Have a process in this place, again and again."""
        failures = 0
        while True:
            try:
                process = self._make()
                await process.start()
            except (ConfigError, DeadlineError, OSError) as error:
                failures += 1
                slot.error = error
                self._changed.set()
                await asyncio.sleep(min(2.0**failures, MAX_RESTART_WAIT_S))
                continue
            failures, slot.error, slot.process = 0, None, process
            self.living[process] = asyncio.create_task(self._see_off(process))
            self._changed.set()
            await process.refuses.wait()

    async def _see_off(self, process: P) -> None:
        await process.refuses.wait()
        await process.retire()
        del self.living[process]
