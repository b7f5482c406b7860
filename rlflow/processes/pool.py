"""Processes that run other people's code, may be killed at any time, and are replaced when they end.

    Pool -> HostedProcess -> Child -> rlflow.processes.supervisor -> rlflow.processes.host -> the code

A call that raises fails by itself. When its process dies, or is killed because a call overran, every call under way in
it fails with the reason, such as "the scoring process was killed by SIGSEGV".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pickle
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlflow.errors import ConfigError, DeadlineError
from rlflow.processes.child import Child
from rlflow.processes.frames import MAX_FRAME_BYTES, Fields, check_size, encode

START_TIMEOUT_S = 120.0
"""For a process to start and load its code."""
MAX_RESTART_WAIT_S = 60.0
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
    """Such as "reward.function"; messages say that it "cannot be loaded in the scoring process"."""
    cure: str
    """What to do about that, such as "define it at the top level of an importable module"."""
    answer: str = "JSON"
    """What an answer is, such as "verdict"."""
    max_answer_bytes: int = MAX_FRAME_BYTES
    max_memory_bytes: int = 0
    """Of each process; 0 is no bound."""
    failed: type[Exception] = CallFailed
    lost: type[Exception] = ProcessLost


def payload_of(content: object, what: str, process: str, cure: str) -> bytes:
    """`content`, pickled. Raises ConfigError: `what` cannot be sent to `process`, the reason, and the cure."""
    try:
        payload = pickle.dumps(content)
        check_size(len(payload))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
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
        arguments = (code.module, str(code.max_memory_bytes))
        self._child = Child("rlflow.processes.supervisor", code.process, *arguments)
        self._calls: dict[int, Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._lost = ""
        self.refuses = asyncio.Event()
        """Set when the process should get no further calls, and be replaced."""
        self.ended = asyncio.Event()
        """Set when the process and all that it started are gone."""

    async def start(self) -> None:
        """Raises ConfigError when the code cannot be loaded, DeadlineError when that takes too long."""
        try:
            await self._load()
        except BaseException:
            self._child.kill()
            await self._child.wait_until_ended()
            raise
        self._spawn(self._listen())

    async def answer_to(self, call: Call) -> Any:
        """The result of a call; each is for one use.

        Raises the code's `failed` when the handler raised, its `lost` when the process ended. A process whose call is
        cancelled is killed.
        """
        if self._lost:
            raise self._code.lost(self._lost)
        self._child.send(call.content)
        self._calls[call.number] = call
        try:
            await self._child.drain()
            return await call.result
        finally:
            del self._calls[call.number]
            if not call.is_answered and not self._lost:
                self._abandon(call)

    def kill(self, reason: str) -> None:
        """End the process; calls under way fail with the reason."""
        self._lose(reason)
        self._child.kill()

    async def retire(self) -> None:
        """Wait until a process that takes no further calls is gone."""
        await self.ended.wait()

    def _abandon(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self.kill(f"{self._code.process} was killed, because {call.operation} was cancelled")

    def _take(self, message: Fields) -> None:
        """One message of the process. Raises ValueError, LookupError or TypeError for nonsense."""
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

    async def _load(self) -> None:
        code = self._code
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._child.connect()
                self._child.send(code.payload)
                await self._child.drain()
                answer = json.loads(await self._child.receive())
        except (EOFError, ConnectionError, ValueError) as error:
            death = await self._child.describe_death()
            raise ConfigError(f"{code.what}: {death} while it loaded {code.what}; its output may say why") from error
        except TimeoutError as error:
            raise DeadlineError(f"start of {code.process}", START_TIMEOUT_S, "importing a module takes long") from error
        if "broken" in answer:
            raise ConfigError(f"{code.what} cannot be loaded in {code.process}: {answer['broken']}; {code.cure}")
        if "refused" in answer:
            raise ConfigError(answer["refused"])

    async def _listen(self) -> None:
        """Take what the process sends, until it ends."""
        cause = ""
        try:
            while True:
                content = await self._child.receive(self._code.max_answer_bytes)
                try:
                    self._take(json.loads(content))
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise ValueError(f"an answer that is no {self._code.answer}: {content[:80]!r}") from error
        except (EOFError, ConnectionError):
            self.refuses.set()
        except ValueError as error:
            self._child.kill()
            cause = f", for it sent what it must not ({error})"
        try:
            self._lose(await self._child.describe_death() + cause)
        except DeadlineError as error:
            self._lose(str(error))
        self.ended.set()


P = TypeVar("P", bound=HostedProcess)
T = TypeVar("T")


class Pool(Generic[P]):
    """So many processes, each replaced when it refuses further calls."""

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
                await self._wait_until(lambda: all(slot.is_open or slot.error for slot in self._slots))
                for slot in self._slots:
                    if slot.error is not None:
                        raise slot.error
            except BaseException:
                await self.close()
                raise

    async def open(self, key: Callable[[P], float]) -> P:
        """The process with the least `key`, of those that take calls; waits for one however long it takes."""
        slots = self._slots
        await self._wait_until(lambda: any(slot.is_open for slot in slots))
        return min((slot.process for slot in slots if slot.process and slot.is_open), key=key)

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[P]:
        """A process for one caller alone; the others wait. Raises what a process that is missing could not start of."""
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
            if slot.process is not None and slot.is_open and slot.process not in self._busy:
                return slot.process
        for slot in self._slots:
            if slot.error is not None:
                raise slot.error
        return None

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


class _Slot(Generic[P]):
    """The place of one process, and of those that replace it."""

    def __init__(self) -> None:
        self.keeping: asyncio.Task[None] | None = None
        self.process: P | None = None
        """The last one that could be started."""
        self.error: Exception | None = None
        """Why none could be started after it."""

    @property
    def is_open(self) -> bool:
        return self.process is not None and not self.process.refuses.is_set()
