"""Rollout engines as Ray actors: how one is watched and brought back, and how the episode runners learn who serves.

The rules are in `rlflow.rollout.fleet`; here is only what Ray does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError

from rlflow.cluster.calls import answer
from rlflow.config import Config, DeadlinesConfig
from rlflow.errors import DeadlineError, EngineLost, RunError, WeightsOvertaken, WorkerError
from rlflow.roles import StagedWeights
from rlflow.runtime.deadlines import within
from rlflow.workers.engine.engine import RolloutEngine

TELL_TIMEOUT_S = 30.0
"""For an episode runner to take in who serves; one that does not answer by then is ended, and told when it is back."""

_GUARD = 'read -r _; kill -KILL -- "-$1" 2>/dev/null'


class EngineActor(RolloutEngine):
    """A rollout engine whose vLLM processes never outlive it, however it ends."""

    def __init__(self, config: Config, model_path: str, index: int, threads: int) -> None:
        super().__init__(config, model_path, index, threads)
        self._guard = _end_group_with_me()

    async def linger(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()


def _end_group_with_me() -> subprocess.Popen[bytes]:
    """Put this process and its later children into a group which a shell kills when this process ends.

    vLLM does not notice that its parent was killed, and would keep its memory for ever. The shell waits for the end of
    a pipe that nobody else holds, so that it cannot miss the end.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "rlflow-guard", str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
    )


class RayEngine:
    """Implements `fleet.EngineProcess` for an actor that Ray restarts under the same handle."""

    def __init__(self, actor: Any, index: int, deadlines: DeadlinesConfig) -> None:
        self._actor = actor
        self._name = f"rollout engine {index}"
        self._deadlines = deadlines
        self._process: Any = None
        """A call that fails when the process does in which vLLM was started last."""

    async def placed(self) -> None:
        if self._process is not None:
            # Otherwise the old process might take the call, and die of it.
            await asyncio.gather(self._process, return_exceptions=True)
        # Retried, for a process that Ray is restarting does not answer yet.
        await self._vital("begin", self._actor.__ray_ready__.options(max_task_retries=-1).remote())
        self._process = self._actor.linger.remote()

    async def start(self) -> None:
        starting = self._vital("start", self._actor.start.remote())
        await self._within("the start", self._deadlines.start_s, starting)

    async def watch(self) -> NoReturn:
        await self._vital("", self._actor.watch.remote())
        raise AssertionError("the watch of an engine ends with an error")

    async def answered(self) -> None:
        await answer(self._name, self._actor.wait_until_answered.remote())

    async def load_weights(self, staged: StagedWeights) -> float:
        loading = self._vital("load weights", self._actor.load_weights.remote(staged))
        return await self._within("a weight update", self._deadlines.weights_s, loading)

    async def sleep(self) -> None:
        sleeping = self._vital("sleep", self._actor.sleep.remote())
        await self._within("the sleep", self._deadlines.weights_s, sleeping)

    async def _within(self, what: str, seconds: float, work: Any) -> Any:
        try:
            return await within(f"{what} of {self._name}", seconds, work)
        except DeadlineError:
            self._end()
            raise

    async def _vital(self, what: str, call: Any) -> Any:
        """The answer to a call; an engine that fails it is ended, for it may be half of one thing and half of
        another."""
        try:
            return await answer(self._name, call, what)
        except WeightsOvertaken:
            raise
        except RunError as error:
            if isinstance(error.__cause__, RayActorError):
                raise EngineLost(str(error)) from error
            self._end()
            raise

    def _end(self) -> None:
        ray.kill(self._actor, no_restart=False)


class Membership:
    """Keeps every episode runner told which engines serve, also one that Ray has restarted."""

    def __init__(self, runners: Sequence[Any]) -> None:
        self._runners = runners
        self._serving: tuple[int, ...] = ()
        self._watches = [asyncio.create_task(self._watch(runner)) for runner in runners]

    async def tell(self, serving: Sequence[int]) -> None:
        """Returns when all runners know, but for those that are being restarted."""
        self._serving = tuple(serving)
        await asyncio.gather(*(self._send(runner) for runner in self._runners))

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.wait(self._watches)

    async def _watch(self, runner: Any) -> None:
        while True:
            try:
                # Retried, for a process that Ray is restarting does not answer yet.
                await answer("episode runner", runner.__ray_ready__.options(max_task_retries=-1).remote())
            except WorkerError:
                return  # Ray cannot bring it back; the groups that are sent to it fail and say why
            life = runner.linger.remote()
            await self._send(runner)
            await asyncio.gather(life, return_exceptions=True)

    async def _send(self, runner: Any) -> None:
        call = answer("episode runner", runner.set_serving.remote(self._serving))
        try:
            await within("telling an episode runner which engines serve", TELL_TIMEOUT_S, call)
        except WorkerError:
            return  # it died, and its watch tells it when it is back
        except DeadlineError:
            ray.kill(runner, no_restart=False)
