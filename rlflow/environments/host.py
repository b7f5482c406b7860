"""Many episodes' environments on one event loop: what an environment process answers (`rlflow.processes.host`).

    message of the runner -> episode -> its task: open, reset, step .., close -> answer

All calls of one episode run in one task, one after the other. So an environment may enter a cancel scope or a task
group in `reset` and leave it in `close`, as clients built on anyio must, and context variables last from call to call.
What an environment does wrong becomes the answer to the call; what it does to the process costs the episodes in it.
"""

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from rlflow.environments.wire import plain, shown_images, task_of
from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Result, Step, ToolSchema
from rlflow.errors import ConfigError, EnvironmentFailure, describe_failure
from rlflow.processes.frames import Fields, FrameTooLong, encode, frame_of, read_frame
from rlflow.types import Message

Build = Callable[..., Environment | Program]

MAX_THREADS = 256
"""How many threads environments may use together; each has a stack that counts as memory of the process."""
CLOSE_GRACE_S = 2.0
"""How long a cancelled call may take to end; then its environment is closed beside it, in another task."""

_episode: contextvars.ContextVar[int] = contextvars.ContextVar("_episode")
"""The episode that runs; tasks and threads that it starts inherit it."""


def load(build: Build) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Raises ConfigError for what cannot build environments."""
    if not callable(build):
        raise ConfigError(f"`build` of an EnvironmentSpec must be a function; got {type(build).__name__}")
    return EnvironmentHost(build).serve


class EnvironmentHost:
    """The episodes of this process. Messages are those of `rlflow.environments.wire`."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self._episodes: dict[int, _Episode] = {}
        """Those that are open, and those that are closed but have a call that does not end."""
        self.asks: dict[int, asyncio.Future[Message]] = {}
        self.ask_numbers = itertools.count()
        self._threads = _CountingThreads(MAX_THREADS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle messages until the runner is gone."""
        self.writer = writer
        asyncio.get_running_loop().set_default_executor(self._threads)
        while True:
            self._handle(json.loads(await read_frame(reader)))

    def _handle(self, message: Fields) -> None:
        if "operation" in message:
            number = message["episode"]
            if number not in self._episodes:  # closing one that never opened, or is closed, does no harm
                self._episodes[number] = episode = _Episode(self, number)
                episode.task.add_done_callback(lambda _: self._episodes.pop(number))
            self._episodes[number].take(message)
        elif "cancel" in message:
            if (episode := self._episodes.get(message["episode"])) is not None:
                episode.cancel(message["cancel"])
            self.send({"acknowledged": message["cancel"]})
        elif (waiting := self.asks.get(message["reply"])) is not None and not waiting.done():
            if "failure" in message:
                waiting.set_exception(EnvironmentFailure(f"ask: {message['failure']}"))
            else:
                waiting.set_result(message["message"])

    def count_leaked(self) -> int:
        """Calls of closed episodes that go on, in threads or in spite of their cancellation."""
        closed = [episode.task for episode in self._episodes.values() if episode.is_closed]
        still_open = {number for number, episode in self._episodes.items() if not episode.is_closed}
        return self._threads.count_without(still_open) + sum(task is not asyncio.current_task() for task in closed)

    def send(self, message: Fields) -> None:
        """Raises EnvironmentFailure for a message that cannot be sent."""
        try:
            self.writer.write(frame_of(encode(message)))
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, FrameTooLong) else f"JSON cannot hold it ({error})"
            raise EnvironmentFailure(f"what the environment said cannot be sent: {reason}") from error


class _Episode:
    """One environment, and the task in which all its calls run."""

    def __init__(self, host: EnvironmentHost, number: int) -> None:
        self._host = host
        self._number = number
        self._world: Environment | Program | None = None
        self._waiting: asyncio.Queue[Fields] = asyncio.Queue()
        self._call: int | None = None
        """The call that runs in the task."""
        self._cancelled: set[int] = set()
        self._closing: asyncio.Task[None] | None = None
        """The task that closes the environment, or has."""
        self._interruption: asyncio.CancelledError | None = None
        """What the environment's own scopes did to the task between two calls."""
        self._thread: ThreadPoolExecutor | None = None
        """Where methods that are not async run, once there is one."""
        self._in_thread: Future[Any] | None = None
        """The last of its calls."""
        self.is_closed = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def take(self, message: Fields) -> None:
        """A call; closing ends the one that is under way."""
        if self._closing is not None:
            self._host.send({"answer": message["call"], "failure": f"{message['operation']}: it is being closed"})
            return
        self._waiting.put_nowait(message)
        if message["operation"] == "close" and self._call is not None:
            self.cancel(self._call)
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._close_beside)

    def cancel(self, call: int) -> None:
        """End a call. One that has not begun never will, unless it is the one that closes."""
        if call in self._cancelled:
            return
        self._cancelled.add(call)
        if call == self._call:
            self.task.cancel()

    async def _run(self) -> None:
        _episode.set(self._number)
        while self._closing is None:
            try:
                message = await self._waiting.get()
            except asyncio.CancelledError as error:  # only scopes and tasks of the environment cancel between calls
                self._interruption = error
                continue
            number = message["call"]
            if number in self._cancelled and message["operation"] != "close":
                continue
            self._cancelled.discard(number)
            self._call = number
            await self._answer(message)
            self._call = None
            if number in self._cancelled:
                self.task.uncancel()
                # If the call had ended before it felt the cancellation, this feels it.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)

    def _close_beside(self) -> None:
        """Close although a call ignores its cancellation; what the environment holds matters more than one task."""
        while self._closing is None and not self._waiting.empty():
            message = self._waiting.get_nowait()
            if message["operation"] == "close":
                _episode.set(self._number)
                self._closing = asyncio.get_running_loop().create_task(self._answer(message))

    async def _answer(self, message: Fields) -> None:
        number, operation = message["call"], message["operation"]
        try:
            try:
                self._host.send({"answer": number, "value": await self._perform(operation, message)})
            except EnvironmentFailure as failure:
                self._host.send({"answer": number, "failure": str(failure)})
        except BaseException as error:  # SystemExit would end the process, and with it all other episodes
            call = {"open": "build"}.get(operation, operation)
            self._host.send({"answer": number, "failure": f"{call}: {describe_failure(error)}"})
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._host.writer.drain()

    async def _perform(self, operation: str, message: Fields) -> Any:
        if operation == "close":
            return await self._close()
        if operation == "open":
            return self._open(message)
        if self._interruption is not None:
            raise EnvironmentFailure(
                f"{operation}: the environment's task was cancelled between two calls, by a task group or cancel scope "
                f"of its own ({self._interruption})"
            )
        if isinstance(self._world, Program):
            result = await self._run_method(self._world.run, task_of(message["task"]), Endpoint(**message["endpoint"]))
            return plain("run", result, Result)
        if self._world is None:
            self._closing = self.task
            raise EnvironmentFailure(f"{operation}: the environment is closed")
        if operation == "reset":
            return plain("reset", await self._run_method(self._world.reset, task_of(message["task"])), Prompt)
        return plain("step", await self._run_method(self._world.step, message["reply"]), Step)

    async def _run_method(self, method: Callable[..., Any], *arguments: object) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="environment")
        self._in_thread = self._thread.submit(method, *arguments)
        # Shielded, so that `close` runs when a call that was given up has ended after all.
        value = await asyncio.shield(asyncio.wrap_future(self._in_thread))
        return await value if inspect.isawaitable(value) else value

    def _open(self, message: Fields) -> str:
        arguments = () if message["resource"] is None else (message["resource"],)
        shown = {"task": task_of(message["task"])} if "task" in message else {}
        world = self._host.build(*arguments, **shown)
        if not isinstance(world, Environment | Program):
            kinds = "an Environment or a Program"
            raise EnvironmentFailure(f"build: expected {kinds} of rlflow.envs.base; got {type(world).__name__}")
        world.seed = message["seed"]
        if isinstance(world, Environment):
            world.ask = self._ask
        self._world = world
        return "environment" if isinstance(world, Environment) else "program"

    async def _close(self) -> None:
        """Also when building it failed, so that the runner need not know."""
        self._closing = asyncio.current_task()
        try:
            if self._world is not None:
                await self._run_method(self._world.close)
        finally:
            self.is_closed = True
            if self._thread is not None:
                self._thread.shutdown(wait=False)
            if self._in_thread is None or self._in_thread.done():
                self._tell_closed()
            else:
                # No thread can be ended. While it hangs the episode is not closed, and the runner replaces the process.
                tell = partial(asyncio.get_running_loop().call_soon_threadsafe, self._tell_closed)
                self._in_thread.add_done_callback(lambda _: tell())

    def _tell_closed(self) -> None:
        self._host.send({"closed": self._number, "leaked": self._host.count_leaked()})

    async def _ask(
        self, messages: Sequence[Message], *, agent: str, tools: Sequence[ToolSchema] = (), trainable: bool = False
    ) -> Message:
        """The runner's reply to what the environment asks in a call."""
        number = next(self._host.ask_numbers)
        waiting = self._host.asks[number] = asyncio.get_running_loop().create_future()
        asked = {
            "messages": shown_images("ask", list(messages)),
            "agent": agent,
            "tools": list(tools),
            "trainable": trainable,
        }
        try:
            self._host.send({"ask": number, "call": self._call, **asked})
            return await waiting
        finally:
            del self._host.asks[number]


class _CountingThreads(ThreadPoolExecutor):
    """Knows for which episodes its threads work: a thread that hangs cannot be ended, only counted."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers, thread_name_prefix="environment")
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()

    def count_without(self, open_episodes: Collection[int]) -> int:
        with self._lock:
            return sum(count for episode, count in self._running.items() if episode not in open_episodes)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        episode = _episode.get(-1)
        self._note(episode, 1)
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._note(episode, -1))
        return future

    def _note(self, episode: int, change: int) -> None:
        with self._lock:
            self._running[episode] += change
            if not self._running[episode]:
                del self._running[episode]
