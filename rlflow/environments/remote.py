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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlflow.environments.wire import conversation_of, fields_of_task, prompt_of, result_of, step_of
from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Result, Step
from rlflow.errors import ConfigError, EnvironmentFailure, EnvironmentLost
from rlflow.processes.frames import Fields, encode
from rlflow.processes.pool import Call, HostedCode, HostedProcess
from rlflow.types import Message, Task

GRACE_S = 5.0
"""How long the process may take to acknowledge a cancellation, and an environment to end after its `close` did."""
CLOSE_TIMEOUT_S = 30.0
"""How long an environment may take to close whose opening was cancelled."""
RETIRE_TIMEOUT_S = 3600.0
"""How long a process that takes no new episodes may keep its own; each has an earlier deadline."""
MAX_LEAKED = 16
"""Calls that go on after their episode has ended, such as threads that hang; with more, a process takes no new ones."""


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode that may hold something in the process."""

    number: int
    freed: Callable[[], None]
    world: _RemoteEnvironment | _RemoteProgram | None = None
    """None until it is open."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    is_stuck: bool = False
    """Whether it was told to close, and does not."""


class _EpisodeCall(Call):
    def __init__(self, operation: str, episode: _Episode, **fields: object) -> None:
        super().__init__(operation, episode=episode.number, **fields)
        self.episode = episode
        self.asked: set[asyncio.Task[None]] = set()
        """What the environment asks the runner for, meanwhile."""


class RemoteHost(HostedProcess):
    """One process for many episodes, from its start to its end."""

    def __init__(self, code: HostedCode) -> None:
        super().__init__(code)
        self._numbers = itertools.count()
        self._episodes: dict[int, _Episode] = {}
        self._acknowledged: dict[int, asyncio.Event] = {}
        self._idle = asyncio.Event()
        """Set while no episode is open but those that are stuck, and when the process is lost."""
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._episodes)

    async def open(
        self, seed: int, task: Task | None, resource: str | None, freed: Callable[[], None]
    ) -> Environment | Program:
        """Build one environment, for `task` if `build` takes one.

        `freed` is called once, when it certainly holds nothing any more, whatever happens. Raises EnvironmentFailure.
        """
        if self._lost:
            freed()
            raise EnvironmentLost(self._lost)
        episode = _Episode(next(self._numbers), freed)
        self._episodes[episode.number] = episode
        self._idle.clear()
        try:
            shown = {} if task is None else {"task": fields_of_task(task)}
            kind = await self.call("open", episode, seed=seed, resource=resource, **shown)
        except BaseException:
            # Calls arrive in order, so that closing finds what opening has left.
            self._spawn(self._close_unopened(episode))
            raise
        episode.world = (_RemoteEnvironment if kind == "environment" else _RemoteProgram)(self, episode)
        episode.world.seed = seed
        return episode.world

    async def close_episode(self, episode: _Episode) -> None:
        """Raises EnvironmentFailure when `close` raised; an environment whose process is lost is closed."""
        try:
            await self.call("close", episode)
        except EnvironmentLost:
            return
        finally:
            if episode.number in self._episodes and not self._lost:
                self._spawn(self._expect_closed(episode))

    async def call(self, operation: str, episode: _Episode, **fields: object) -> Any:
        """What the environment's method returned, as JSON.

        Raises EnvironmentFailure; ConfigError for a task that cannot be sent; what the runner's own `ask` raised.
        """
        try:
            call = _EpisodeCall(operation, episode, **fields)
        except (TypeError, ValueError, RecursionError) as error:
            task = fields.get("task")
            what = f"task {task['id']!r}" if isinstance(task, dict) else "the message"
            raise ConfigError(
                f"{what} cannot be sent to the environment's process ({operation}): {error}; keep the columns of "
                "`data` to plain values, and load large ones in the environment"
            ) from error
        try:
            return await self.answer_to(call)
        finally:
            for asked in call.asked:
                asked.cancel()

    async def retire(self) -> None:
        """Wait until all open episodes have ended, except those that are stuck, then end the process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                await self._idle.wait()
        self.kill("the environment process was replaced, and an environment in it did not close")
        await self.ended.wait()

    async def _listen(self) -> None:
        await super()._listen()
        for number in list(self._episodes):
            self._free(number)

    def _take(self, message: Fields) -> None:
        if "answer" in message:
            super()._take(message)
        elif "acknowledged" in message:
            if (acknowledged := self._acknowledged.get(message["acknowledged"])) is not None:
                acknowledged.set()
        elif "closed" in message:
            self._free(message["closed"])
            if message["leaked"] > MAX_LEAKED:
                self.refuses.set()
        elif isinstance(call := self._calls.get(message["call"]), _EpisodeCall):
            call.asked.add(self._spawn(self._serve(call, message)))
        else:
            self._send(encode({"reply": message["ask"], "failure": "the call that asks has ended"}))

    async def _serve(self, call: _EpisodeCall, message: Fields) -> None:
        """Have the runner answer what an environment asks. If that fails, the call that asks raises its error."""
        world = call.episode.world
        assert isinstance(world, _RemoteEnvironment), "only an environment is given `ask`"
        try:
            messages, tools = conversation_of(message)
            reply = await world.ask(messages, agent=message["agent"], tools=tools, trainable=message["trainable"])
            self._send(encode({"reply": message["ask"], "message": reply}))
        except Exception as error:
            call.fail(error)

    def _abandon(self, call: Call) -> None:
        assert isinstance(call, _EpisodeCall)
        self._spawn(self._cancel(call))

    async def _cancel(self, call: _EpisodeCall) -> None:
        acknowledged = self._acknowledged[call.number] = asyncio.Event()
        self._send(encode({"cancel": call.number, "episode": call.episode.number}))
        try:
            while not await _is_set_within(acknowledged, GRACE_S):
                # Building may take its time, which has a deadline of its own, on the event loop of all.
                if any(call.operation == "open" and not call.result.done() for call in self._calls.values()):
                    continue
                cause = "something in an environment blocks its event loop"
                self.kill(f"the environment process was killed, for it did not react within {GRACE_S:g} s: {cause}")
                return
        finally:
            del self._acknowledged[call.number]

    async def _close_unopened(self, episode: _Episode) -> None:
        with contextlib.suppress(EnvironmentFailure, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.close_episode(episode)

    async def _expect_closed(self, episode: _Episode) -> None:
        """A process in which an environment does not end is replaced: that frees what the environment holds."""
        if not await _is_set_within(episode.closed, GRACE_S):
            episode.is_stuck = True
            self.refuses.set()
            self._note_idle()

    def _lose(self, reason: str) -> None:
        super()._lose(reason)
        self._idle.set()

    def _free(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is not None:
            episode.closed.set()
            episode.freed()
            self._note_idle()

    def _note_idle(self) -> None:
        if all(episode.is_stuck for episode in self._episodes.values()):
            self._idle.set()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class _Remote:
    def __init__(self, host: RemoteHost, episode: _Episode) -> None:
        self._host = host
        self._episode = episode

    async def close(self) -> None:
        await self._host.close_episode(self._episode)


class _RemoteEnvironment(_Remote, Environment):
    """The runner sets `ask`; the seed is the one it was opened with."""

    async def reset(self, task: Task) -> Prompt:
        return prompt_of(await self._host.call("reset", self._episode, task=fields_of_task(task)))

    async def step(self, reply: Message) -> Step:
        return step_of(await self._host.call("step", self._episode, reply=reply))


class _RemoteProgram(_Remote, Program):
    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        where = dataclasses.asdict(endpoint)
        return result_of(await self._host.call("run", self._episode, task=fields_of_task(task), endpoint=where))
