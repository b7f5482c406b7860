"""Scoring in processes that can be killed.

    ScorerPool.score -> idle process -> reward functions -> Verdict

A reward function may raise, hang, crash or return nonsense; each is a Verdict without a reward, and none of them
reaches the process that asks. A process that overran its deadline is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from collections.abc import Sequence

from rlflow.errors import ConfigError, DeadlineError
from rlflow.processes.child import Child
from rlflow.processes.frames import FrameTooLong, check_size
from rlflow.rewards.call import ChosenReward
from rlflow.types import EpisodeEnd, Transcript, Verdict

START_TIMEOUT_S = 120.0
"""Seconds for a scoring process to start and import the reward function."""
MAX_ANSWER_BYTES = 1 << 20
"""A verdict is far smaller; a process that announces more has been meddled with."""


class ScorerPool:
    """Processes that score, one episode at a time each; callers wait for an idle one.

    Each process loads all functions. What they print goes to standard error, up to a bound. `timeout_s` is for all
    functions of an episode together.
    """

    def __init__(self, rewards: Sequence[ChosenReward], workers: int, timeout_s: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive; got {timeout_s}")
        self._rewards = _pickled(rewards, timeout_s)
        names = ", ".join(one.name for one in rewards)
        self._too_long = f"{names}: took longer than {timeout_s:g} s (reward.timeout_s)"
        self._timeout_s = timeout_s
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._starting = asyncio.Lock()
        self._is_started = False

    async def start(self) -> None:
        """Start the processes, unless they are, and wait until each has loaded the functions.

        Raises:
            ConfigError: a function cannot be loaded, or has none of the accepted shapes.
            DeadlineError: loading them takes too long.
        """
        async with self._starting:
            if self._is_started:
                return
            for slot in self._slots:
                slot.restart(self._rewards)
            try:
                await asyncio.gather(*(slot.child() for slot in self._slots))
            except BaseException:
                await self.close()
                raise
            for slot in self._slots:
                self._idle.put_nowait(slot)
            self._is_started = True

    async def score(self, transcript: Transcript) -> Verdict:
        """Score one episode. Only scoring counts towards the deadline, not waiting for a process.

        Raises:
            ConfigError: the task cannot be sent, or a process cannot load the functions.
        """
        request = _request_of(transcript)
        await self.start()
        idle = self._idle
        slot = await idle.get()
        is_reusable = False
        try:
            child = await slot.child()
            verdict, is_reusable = await self._ask(child, request)
            return verdict
        finally:
            # A process that was left in the middle of a request would answer the next one with the wrong verdict. A
            # closed pool has another queue, and its processes stay dead.
            if idle is self._idle:
                if not is_reusable:
                    slot.restart(self._rewards)
                idle.put_nowait(slot)

    async def close(self) -> None:
        """Kill the processes and all that they started; what is being scored fails."""
        self._idle = asyncio.Queue()
        self._is_started = False
        await asyncio.gather(*(slot.stop() for slot in self._slots))

    async def _ask(self, child: Child, request: bytes) -> tuple[Verdict, bool]:
        """The verdict, and whether the process can go on."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return _verdict_of(await _exchange(child, request)), True
        except TimeoutError:
            return Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=self._too_long), False
        except (EOFError, ConnectionError, ValueError) as error:
            return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=await _describe_end(child, error)), False


class _Slot:
    """The place of one scoring process, and of those that replace it."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._starting: asyncio.Task[Child] | None = None

    def restart(self, rewards: bytes) -> None:
        """Kill the process, if there is one, and begin to start another."""
        if self._starting is not None:
            self._starting.cancel()
        if self._child is not None:
            self._child.kill()
        self._starting = asyncio.create_task(self._start(rewards))

    async def child(self) -> Child:
        """The process, once it has loaded the functions."""
        assert self._starting is not None, "start the pool before the first request"
        return await asyncio.shield(self._starting)

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._child is not None:
            self._child.kill()
            await self._child.wait_until_ended()

    async def _start(self, rewards: bytes) -> Child:
        try:
            if self._child is not None:
                await self._child.wait_until_ended()
        except DeadlineError:
            self._child = None  # it cannot be killed: whoever tries again does without its end
            raise
        self._child = child = Child("rlflow.rewards.process", "the scoring process")
        await _load(child, rewards)
        return child


async def _load(child: Child, rewards: bytes) -> None:
    """Wait until the process has loaded the functions."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await child.connect()
            answer = json.loads(await _exchange(child, rewards))
    except TimeoutError as error:
        hint = "importing the module of reward.function takes too long"
        raise DeadlineError("start of a scoring process", START_TIMEOUT_S, hint) from error
    except (EOFError, ConnectionError, ValueError) as error:
        raise ConfigError(
            f"reward.function: {await _describe_end(child, error)} while it loaded the function"
        ) from error
    if "error" in answer:
        raise ConfigError(answer["error"])


async def _exchange(child: Child, request: bytes) -> bytes:
    """The answer to one request. Raises as `Child.receive`."""
    child.send(request)
    await child.drain()
    return await child.receive(MAX_ANSWER_BYTES)


async def _describe_end(child: Child, error: Exception) -> str:
    """How a process ended that gave no answer; a ValueError says what it gave instead."""
    if not isinstance(error, ValueError):
        return await child.describe_death()
    child.kill()
    return f"{await child.describe_death()}, for it sent what it must not ({error})"


def _pickled(rewards: Sequence[ChosenReward], timeout_s: float) -> bytes:
    try:
        content = pickle.dumps((list(rewards), timeout_s))
        check_size(len(content))
        return content
    except FrameTooLong as error:
        raise ConfigError(
            f"the reward function and reward.args cannot be sent to the scoring process: {error}; load what is large "
            "in the function's module"
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the reward function cannot be sent to its scoring process: {error}; define it at the top level of an "
            "importable module, or give reward.function=file.py:function"
        ) from error


def _request_of(transcript: Transcript) -> bytes:
    try:
        content = json.dumps(dataclasses.asdict(transcript)).encode()
        check_size(len(content))
        return content
    except FrameTooLong as error:
        raise ConfigError(
            f"task {transcript.task.id!r}: its episode cannot be sent to the scoring process: {error}; keep the "
            "columns of `data` short, and load large ones in the reward function"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"task {transcript.task.id!r} has data that JSON cannot hold ({error}); keep the columns of `data` to "
            "plain values"
        ) from error


def _verdict_of(answer: bytes) -> Verdict:
    """Raises ValueError for what is no verdict: something else writes to the socket."""
    try:
        fields = json.loads(answer)
        return Verdict(
            reward=fields["reward"],
            end=EpisodeEnd(fields["end"]) if fields["end"] else None,
            detail=fields["detail"],
            metrics=fields["metrics"],
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"an answer that is no verdict: {answer[:80]!r}") from error
