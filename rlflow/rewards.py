"""Scoring in processes that can be killed.

    ScorerPool.score -> idle process -> reward functions -> Verdict

A reward function may raise, hang, crash or return nonsense; each is a Verdict without a reward, and none of them
reaches the process that asks. A process that overran its deadline is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from rlflow.errors import ConfigError, DeadlineError
from rlflow.reward_call import ChosenReward
from rlflow.types import EpisodeEnd, Transcript, Verdict

START_TIMEOUT_S = 120.0
"""Seconds for a scoring process to start and import the reward function."""
KILL_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
"""A verdict is far smaller; a process that announces more has been meddled with."""


class ScorerPool:
    """Processes that score, one episode at a time each; callers wait for an idle one.

    Each process loads all functions. It is started in a session of its own, with standard output sent to standard
    error. `timeout_s` is for all functions of an episode together.
    """

    def __init__(self, rewards: Sequence[ChosenReward], workers: int, timeout_s: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive; got {timeout_s}")
        self._rewards = _frame_of(rewards, timeout_s)
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
                await asyncio.gather(*(slot.worker() for slot in self._slots))
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
            worker = await slot.worker()
            verdict, is_reusable = await self._ask(worker, request)
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

    async def _ask(self, worker: _Worker, request: bytes) -> tuple[Verdict, bool]:
        """The verdict, and whether the process can go on."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return _verdict_of(await worker.ask(request)), True
        except TimeoutError:
            return Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=self._too_long), False
        except (asyncio.IncompleteReadError, ConnectionError):
            return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=await worker.describe_death()), False


class _Slot:
    """The place of one scoring process, and of those that replace it."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._starting: asyncio.Task[_Worker] | None = None

    def restart(self, rewards: bytes) -> None:
        """Kill the process, if there is one, and begin to start another."""
        old, self._worker = self._worker, None
        if self._starting is not None:
            self._starting.cancel()
        if old is not None:
            old.kill()
        self._starting = asyncio.create_task(self._start(rewards, old))

    async def worker(self) -> _Worker:
        """The process, once it has loaded the functions."""
        assert self._starting is not None, "start the pool before the first request"
        return await asyncio.shield(self._starting)

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._worker is not None:
            self._worker.kill()
            await self._worker.ended()

    async def _start(self, rewards: bytes, old: _Worker | None) -> _Worker:
        if old is not None:
            await old.ended()
        self._worker = worker = _Worker(rewards)
        await worker.load()
        return worker


class _Worker:
    """One scoring process and the socket to it."""

    def __init__(self, rewards: bytes) -> None:
        self._rewards = rewards
        self._socket, theirs = socket.socketpair()
        life_read, self._life_fd = os.pipe()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_killed = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlflow.reward_process", str(theirs.fileno()), str(life_read)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                pass_fds=(theirs.fileno(), life_read),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(life_read)

    async def load(self) -> None:
        """Wait until the process has loaded the functions."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._streams = await asyncio.open_unix_connection(sock=self._socket)
                answer = json.loads(await self.ask(self._rewards))
        except TimeoutError as error:
            hint = "importing the module of reward.function takes too long"
            raise DeadlineError("start of a scoring process", START_TIMEOUT_S, hint) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ConfigError(f"reward.function: {await self.describe_death()} while it loaded the function") from error
        if "error" in answer:
            raise ConfigError(answer["error"])

    async def ask(self, request: bytes) -> bytes:
        """The answer to one request.

        Raises:
            asyncio.IncompleteReadError, ConnectionError: the process died, or sends what is no answer.
        """
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(len(request).to_bytes(4, "big") + request)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_ANSWER_BYTES:
            raise ConnectionError(f"an answer of {size} bytes")
        return await reader.readexactly(size)

    async def describe_death(self) -> str:
        """How the process died; it has closed its socket."""
        self.kill()
        code = await self.ended()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the scoring process {how}"

    def kill(self) -> None:
        """Kill the process and all that it started in its group, and give back what belongs to it."""
        if self._is_killed:
            return
        self._is_killed = True
        # The group still exists when its leader is dead: the process that watches over it is a member.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._life_fd)
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    async def ended(self) -> int:
        """The exit code of the killed process."""
        try:
            return await asyncio.to_thread(self._process.wait, KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError("end of a scoring process that was killed", KILL_TIMEOUT_S) from error


def _frame_of(rewards: Sequence[ChosenReward], timeout_s: float) -> bytes:
    try:
        return pickle.dumps((list(rewards), timeout_s))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the reward function cannot be sent to its scoring process: {error}; define it at the top level of an "
            "importable module, or give reward.function=file.py:function"
        ) from error


def _request_of(transcript: Transcript) -> bytes:
    try:
        return json.dumps(dataclasses.asdict(transcript)).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task {transcript.task.id!r} has data that JSON cannot hold ({error}); keep the columns of `data` to "
            "plain values"
        ) from error


def _verdict_of(answer: bytes) -> Verdict:
    """Raises ConnectionError for what is no verdict: something else writes to the socket."""
    try:
        fields = json.loads(answer)
        return Verdict(
            reward=fields["reward"],
            end=EpisodeEnd(fields["end"]) if fields["end"] else None,
            detail=fields["detail"],
            metrics=fields["metrics"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ConnectionError(f"an answer that is no verdict: {answer[:80]!r}") from error
