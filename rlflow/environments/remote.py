"""An environment process as the runner sees it, and the environments in it as objects of the usual kind.

    RemoteHost.open -> Environment or Program -> each method is a call -> the process -> the answer

A call that is cancelled is cancelled in the process too. A process that does not even acknowledge that is blocked: it
is killed, and its episodes end with EnvironmentLost, as when it dies by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rlflow.environments.wire import Frame, conversation_of, encode, fields_of_task, prompt_of, result_of, step_of
from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Result, Step
from rlflow.errors import ConfigError, DeadlineError, EnvironmentFailure, EnvironmentLost
from rlflow.processes.child import Child
from rlflow.processes.frames import FrameTooLong
from rlflow.types import Message, Task

START_TIMEOUT_S = 120.0
"""For a process to start and import the environment."""
GRACE_S = 5.0
"""For the process to acknowledge that a call is cancelled, and for an environment to end when its `close` is."""
CLOSE_TIMEOUT_S = 30.0
"""For an environment whose opening was cancelled to close."""
RETIRE_TIMEOUT_S = 3600.0
"""For the episodes of a process that takes no new ones; each has a deadline of its own, which is earlier."""
MAX_LEAKED = 16
"""Calls that go on after their episode has ended, such as threads that hang; with more, a process takes no new ones."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call under way."""

    operation: str
    episode: int
    answer: asyncio.Future[Any]
    is_answered: bool = False
    """By the process, rather than given up."""
    asked: set[asyncio.Task[None]] = field(default_factory=set)
    """What the environment asks the runner for, meanwhile."""

    def settle(self, value: Any, failure: str | None) -> None:
        self.is_answered = True
        if self.answer.done():
            return
        if failure is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(EnvironmentFailure(failure))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Episode:
    """One that may hold something in the process."""

    freed: Callable[[], None]
    world: _RemoteEnvironment | _RemoteProgram | None = None
    """None until it is open."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    is_stuck: bool = False
    """Whether it was told to close, and does not."""


class RemoteHost:
    """One process, from its start to its end."""

    def __init__(self, build: bytes, max_memory_bytes: int) -> None:
        """Start the process; `start` waits for it. `build` is pickled."""
        self._build = build
        self._child = Child("rlflow.environments.process", "the environment process", str(max_memory_bytes))
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._episodes: dict[int, _Episode] = {}
        self._acknowledged: dict[int, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._lost = ""
        self.idle = asyncio.Event()
        """Set while no episode is open but those that are stuck, and when the process is lost."""
        self.idle.set()
        self.refuses = asyncio.Event()
        """Set when no further episode should be opened."""
        self.ended = asyncio.Event()
        """Set when the process and all that it started are gone."""

    @property
    def num_open(self) -> int:
        return len(self._episodes)

    async def start(self) -> None:
        """Raises ConfigError when the environment cannot be loaded, DeadlineError when that takes too long."""
        try:
            await self._load()
        except BaseException:
            self._child.kill()
            await self._child.wait_until_ended()
            raise
        self._spawn(self._listen())

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._child.connect()
                self._child.send(self._build)
                answer = json.loads(await self._child.receive())
        except (EOFError, ConnectionError) as error:
            death = await self._child.describe_death()
            raise ConfigError(f"{death} while it loaded the environment; its output may say why") from error
        except FrameTooLong as error:
            raise ConfigError(f"the environment's `build` cannot be sent to its process: {error}") from error
        except TimeoutError as error:
            hint = "importing the environment's module takes too long"
            raise DeadlineError("start of an environment process", START_TIMEOUT_S, hint) from error
        if "error" in answer:
            raise ConfigError(answer["error"])

    async def open(self, seed: int, resource: str | None, freed: Callable[[], None]) -> Environment | Program:
        """Build one environment. `freed` is called once, when it certainly holds nothing any more, whatever happens.

        Raises EnvironmentFailure.
        """
        if self._lost:
            freed()
            raise EnvironmentLost(self._lost)
        number = next(self._numbers)
        episode = self._episodes[number] = _Episode(freed=freed)
        self.idle.clear()
        try:
            kind = await self.call("open", number, seed=seed, resource=resource)
        except BaseException:
            # Calls arrive in order, so that closing finds whatever opening has left.
            self._spawn(self._close_unopened(number))
            raise
        world = episode.world = (
            _RemoteEnvironment(self, number) if kind == "environment" else _RemoteProgram(self, number)
        )
        world.seed = seed
        return world

    async def close_episode(self, number: int) -> None:
        """Raises EnvironmentFailure when `close` raised; an environment whose process is lost is closed."""
        try:
            if not self._lost:
                await self.call("close", number)
        except EnvironmentLost:
            return
        finally:
            if number in self._episodes and not self._lost:
                self._spawn(self._expect_closed(self._episodes[number]))

    async def call(self, operation: str, episode: int, **fields: object) -> Any:
        """What the environment's method returned, as JSON.

        Raises EnvironmentFailure; ConfigError for a task that cannot be sent; what the runner's own `ask` raised.
        """
        if self._lost:
            raise EnvironmentLost(self._lost)
        number = next(self._numbers)
        self._send(operation, {"call": number, "operation": operation, "episode": episode, **fields})
        call = self._calls[number] = _Call(operation, episode, asyncio.get_running_loop().create_future())
        try:
            await self._child.drain()
            return await call.answer
        finally:
            del self._calls[number]
            for asked in call.asked:
                asked.cancel()
            if not call.is_answered and not self._lost:
                self._spawn(self._cancel(number))

    def kill(self, reason: str) -> None:
        """End the process; what is under way raises EnvironmentLost with the reason."""
        self._lose(reason)
        self._child.kill()

    async def retire(self) -> None:
        """Let the open episodes end, but for those that are stuck, then the process."""
        self.refuses.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                await self.idle.wait()
        self.kill("the environment process was replaced, and an environment in it did not close")
        await self.ended.wait()

    async def _listen(self) -> None:
        """Take what the process sends, until it ends."""
        try:
            while True:
                self._take(json.loads(await self._child.receive()))
        except (EOFError, ConnectionError):
            self.refuses.set()
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self.kill(f"the environment process was killed: it sent what it must not ({error})")
        try:
            self._lose(await self._child.describe_death())
        except DeadlineError as error:
            self._lose(str(error))
        for number in list(self._episodes):
            self._free(number)
        self.ended.set()

    def _take(self, frame: Frame) -> None:
        if "answer" in frame:
            if (call := self._calls.get(frame["answer"])) is not None:
                call.settle(frame.get("value"), frame.get("failure"))
        elif "acknowledged" in frame:
            if (acknowledged := self._acknowledged.get(frame["acknowledged"])) is not None:
                acknowledged.set()
        elif "closed" in frame:
            self._free(frame["closed"])
            if frame["leaked"] > MAX_LEAKED:
                self.refuses.set()
        elif (call := self._calls.get(frame["call"])) is not None:
            call.asked.add(self._spawn(self._serve(call, frame)))
        else:
            self._child.send(encode({"reply": frame["ask"], "failure": "the call that asks has ended"}))

    async def _serve(self, call: _Call, frame: Frame) -> None:
        """Have the runner answer what an environment asks. Where it fails, the call that asks raises its error."""
        world = self._episodes[call.episode].world
        assert isinstance(world, _RemoteEnvironment), "only an environment is given `ask`"
        try:
            messages, tools = conversation_of(frame)
            reply = await world.ask(messages, agent=frame["agent"], tools=tools, trainable=frame["trainable"])
            self._child.send(encode({"reply": frame["ask"], "message": reply}))
        except Exception as error:
            call.fail(error)

    async def _cancel(self, number: int) -> None:
        acknowledged = self._acknowledged[number] = asyncio.Event()
        self._child.send(encode({"cancel": number}))
        try:
            while not await _is_set_within(acknowledged, GRACE_S):
                # Building may take its time, which has a deadline of its own, on the event loop of all.
                if any(call.operation == "open" and not call.answer.done() for call in self._calls.values()):
                    continue
                cause = "something in an environment blocks its event loop"
                self.kill(f"the environment process was killed, for it did not react within {GRACE_S:g} s: {cause}")
                return
        finally:
            del self._acknowledged[number]

    async def _close_unopened(self, number: int) -> None:
        with contextlib.suppress(EnvironmentFailure, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.close_episode(number)

    async def _expect_closed(self, episode: _Episode) -> None:
        """A process in which an environment does not end is replaced: that frees what the environment holds."""
        try:
            async with asyncio.timeout(GRACE_S):
                await episode.closed.wait()
        except TimeoutError:
            episode.is_stuck = True
            self.refuses.set()
            self._note_idle()

    def _send(self, operation: str, frame: Frame) -> None:
        try:
            self._child.send(encode(frame))
        except (TypeError, ValueError, RecursionError) as error:
            task = frame.get("task")
            what = f"task {task['id']!r}" if isinstance(task, dict) else "the message"
            raise ConfigError(
                f"{what} cannot be sent to the environment's process ({operation}): {error}; keep the columns of "
                "`data` to plain values, and load large ones in the environment"
            ) from error

    def _lose(self, reason: str) -> None:
        """From here on, every call fails; the first reason counts."""
        if self._lost:
            return
        self._lost = reason
        self.refuses.set()
        self.idle.set()
        for call in self._calls.values():
            call.fail(EnvironmentLost(reason))

    def _free(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.closed.set()
        episode.freed()
        self._note_idle()

    def _note_idle(self) -> None:
        if all(episode.is_stuck for episode in self._episodes.values()):
            self.idle.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class _RemoteEnvironment(Environment):
    """The runner sets `ask`; the seed is the one it was opened with."""

    def __init__(self, host: RemoteHost, episode: int) -> None:
        self._host = host
        self._episode = episode

    async def reset(self, task: Task) -> Prompt:
        return prompt_of(await self._host.call("reset", self._episode, task=fields_of_task(task)))

    async def step(self, reply: Message) -> Step:
        return step_of(await self._host.call("step", self._episode, reply=reply))

    async def close(self) -> None:
        await self._host.close_episode(self._episode)


class _RemoteProgram(Program):
    def __init__(self, host: RemoteHost, episode: int) -> None:
        self._host = host
        self._episode = episode

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        where = dataclasses.asdict(endpoint)
        return result_of(await self._host.call("run", self._episode, task=fields_of_task(task), endpoint=where))

    async def close(self) -> None:
        await self._host.close_episode(self._episode)
