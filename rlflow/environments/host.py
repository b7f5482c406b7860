"""Many episodes' environments on one event loop: the work of an environment process."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlflow.environments.wire import Frame, encode, plain, task_of
from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Result, Step, ToolSchema
from rlflow.errors import EnvironmentFailure, describe_failure
from rlflow.processes.frames import FrameTooLong, frame_of
from rlflow.types import Message

Build = Callable[..., Environment | Program]

MAX_THREADS = 256
"""For what environments run in threads; each has a stack that counts as memory of the process."""
CLOSE_GRACE_S = 2.0
"""For a cancelled call to end before its environment is closed."""

_call: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("_call")
"""Number and episode of the call that runs; tasks and threads that it starts inherit it."""


class EnvironmentHost:
    """Answers the runner's calls; each runs as a task of its own."""

    def __init__(self, build: Build, writer: asyncio.StreamWriter) -> None:
        self._build = build
        self._writer = writer
        self._worlds: dict[int, Environment | Program] = {}
        self._calls: dict[int, tuple[int, asyncio.Task[None]]] = {}
        """Number -> episode and task."""
        self._asks: dict[int, asyncio.Future[Message]] = {}
        self._ask_numbers = itertools.count()
        self._threads = _CountingThreads(MAX_THREADS)
        asyncio.get_running_loop().set_default_executor(self._threads)

    def handle(self, frame: Frame) -> None:
        """One message of the runner."""
        if "operation" in frame:
            number = frame["call"]
            task = asyncio.get_running_loop().create_task(self._answer(frame))
            self._calls[number] = (frame["episode"], task)
            task.add_done_callback(lambda _: self._calls.pop(number))
        elif "cancel" in frame:
            if frame["cancel"] in self._calls:
                self._calls[frame["cancel"]][1].cancel()
            self._send({"acknowledged": frame["cancel"]})
        elif (waiting := self._asks.get(frame["reply"])) is not None and not waiting.done():
            if "failure" in frame:
                waiting.set_exception(EnvironmentFailure(f"ask: {frame['failure']}"))
            else:
                waiting.set_result(frame["message"])

    async def _answer(self, frame: Frame) -> None:
        number, episode, operation = frame["call"], frame["episode"], frame["operation"]
        _call.set((number, episode))
        try:
            try:
                answer = {"answer": number, "value": await self._perform(operation, episode, frame)}
                self._send(answer)
            except EnvironmentFailure as failure:
                self._send({"answer": number, "failure": str(failure)})
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                raise
            self._send_failure(number, operation, error)
        except BaseException as error:  # SystemExit would end the process, and with it all other episodes
            self._send_failure(number, operation, error)
        await self._writer.drain()

    async def _perform(self, operation: str, episode: int, frame: Frame) -> Any:
        if operation == "open":
            return self._open(episode, frame["seed"], frame["resource"])
        if operation == "close":
            return await self._close(episode)
        world = self._worlds[episode]
        if isinstance(world, Program):
            result = await world.run(task_of(frame["task"]), Endpoint(**frame["endpoint"]))
            return plain("run", result, Result)
        if operation == "reset":
            return plain("reset", await world.reset(task_of(frame["task"])), Prompt)
        return plain("step", await world.step(frame["reply"]), Step)

    def _open(self, episode: int, seed: int, resource: str | None) -> str:
        world = self._build() if resource is None else self._build(resource)
        if not isinstance(world, Environment | Program):
            kinds = "an Environment or a Program"
            raise EnvironmentFailure(f"build: expected {kinds} of rlflow.envs.base; got {type(world).__name__}")
        world.seed = seed
        if isinstance(world, Environment):
            world.ask = self._ask
        self._worlds[episode] = world
        return "environment" if isinstance(world, Environment) else "program"

    async def _close(self, episode: int) -> None:
        """Also when building it failed, so that the runner need not know."""
        world = self._worlds.pop(episode, None)
        try:
            under_way = [task for other, task in self._calls.values() if other == episode and not _is_current(task)]
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way, timeout=CLOSE_GRACE_S)
            if world is not None:
                await world.close()
        finally:
            self._send({"closed": episode, "leaked": self._num_leaked()})

    async def _ask(
        self, messages: Sequence[Message], *, agent: str, tools: Sequence[ToolSchema] = (), trainable: bool = False
    ) -> Message:
        call, _ = _call.get()
        number = next(self._ask_numbers)
        waiting = self._asks[number] = asyncio.get_running_loop().create_future()
        asked = {"messages": list(messages), "agent": agent, "tools": list(tools), "trainable": trainable}
        try:
            self._send({"ask": number, "call": call, **asked})
            return await waiting
        finally:
            del self._asks[number]

    def _num_leaked(self) -> int:
        """Calls of closed episodes that go on, in threads or in spite of their cancellation."""
        tasks = [task for episode, task in self._calls.values() if episode not in self._worlds]
        return self._threads.count_without(self._worlds) + sum(not _is_current(task) for task in tasks)

    def _send_failure(self, number: int, operation: str, error: BaseException) -> None:
        call = {"open": "build"}.get(operation, operation)
        self._send({"answer": number, "failure": f"{call}: {describe_failure(error)}"})

    def _send(self, frame: Frame) -> None:
        """Raises EnvironmentFailure for a message that cannot be sent."""
        try:
            self._writer.write(frame_of(encode(frame)))
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, FrameTooLong) else f"JSON cannot hold it ({error})"
            raise EnvironmentFailure(f"what the environment said cannot be sent: {reason}") from error


def _is_current(task: asyncio.Task[None]) -> bool:
    return task is asyncio.current_task()


class _CountingThreads(ThreadPoolExecutor):
    """Knows for which episodes its threads work: a thread that hangs cannot be ended, only counted."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers, thread_name_prefix="environment")
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()

    def count_without(self, open_episodes: dict[int, Any]) -> int:
        with self._lock:
            return sum(count for episode, count in self._running.items() if episode not in open_episodes)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        _, episode = _call.get((-1, -1))
        self._note(episode, 1)
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._note(episode, -1))
        return future

    def _note(self, episode: int, change: int) -> None:
        with self._lock:
            self._running[episode] += change
            if not self._running[episode]:
                del self._running[episode]
