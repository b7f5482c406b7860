"""Rollout engines as Ray actors: how one is watched and brought back, and how the episode runners learn who serves.

The rules are in `rlflow.rollout.fleet`; this module does only what needs Ray.
"""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn

import ray

from rlflow.cluster.calls import answer, has_ended, wait_until_back
from rlflow.config import Config, DeadlinesConfig
from rlflow.errors import DeadlineError, EngineLost, RunError, WeightsOvertaken, WorkerError
from rlflow.roles import StagedWeights
from rlflow.runtime import scratch
from rlflow.runtime.deadlines import within
from rlflow.workers.engine.engine import RolloutEngine

TELL_TIMEOUT_S = 30.0
"""Seconds for an episode runner to learn which engines serve. A slower one is killed, and told when it is back."""


class EngineActor(RolloutEngine):
    """A rollout engine whose vLLM processes never outlive it, however it ends."""

    def __init__(self, config: Config, model_path: str, index: int, threads: int) -> None:
        scratch.enter(f"engine-{index}")
        super().__init__(config, model_path, index, threads)
        # vLLM does not notice that its parent was killed, and would keep its memory forever. So this process and its
        # later children are a group of their own, which a shell kills when this process ends. The shell reads from a
        # pipe that nobody else holds, so it cannot miss the end. It
        # holds the lock of the run's folder, because vLLM's processes write there.
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        kill_group = 'read -r _; kill -KILL -- "-$1" 2>/dev/null'
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", kill_group, "rlflow-guard", str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[scratch.hold()],
        )

    async def linger(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()


class RayEngine:
    """Implements `fleet.EngineProcess` for an actor that Ray restarts under the same handle."""

    def __init__(self, actor: Any, index: int, deadlines: DeadlinesConfig) -> None:
        self._actor = actor
        self._name = f"rollout engine {index}"
        self._deadlines = deadlines
        self._process: Any = None
        """A call that fails when the process ends in which vLLM was last started."""

    async def wait_until_placed(self) -> None:
        if self._process is not None:
            # Otherwise the old process might take the call, and die of it.
            await asyncio.gather(self._process, return_exceptions=True)
        await self._vital(wait_until_back(self._name, self._actor, "begin"))
        self._process = self._actor.linger.remote()

    async def start(self) -> None:
        await self._timed("the start", self._deadlines.start_s, "start", self._actor.start.remote())

    async def watch(self) -> NoReturn:
        await self._vital(answer(self._name, self._actor.watch.remote()))
        raise AssertionError("the watch of an engine ends with an error")

    async def wait_until_answered(self) -> None:
        await answer(self._name, self._actor.wait_until_answered.remote())

    async def load_weights(self, staged: StagedWeights) -> float:
        loading = self._actor.load_weights.remote(staged)
        return await self._timed("a weight update", self._deadlines.weights_s, "load weights", loading)

    async def sleep(self) -> None:
        await self._timed("the sleep", self._deadlines.weights_s, "sleep", self._actor.sleep.remote())

    async def _timed(self, stage: str, seconds: float, what: str, call: Any) -> Any:
        """The answer to a call that must come within a deadline."""
        try:
            answering = self._vital(answer(self._name, call, what))
            return await within(f"{stage} of {self._name}", seconds, answering)
        except DeadlineError:
            self._end()
            raise

    async def _vital(self, answering: Awaitable[Any]) -> Any:
        """The answer to a call. An engine whose call failed is killed, because its state may be inconsistent."""
        try:
            return await answering
        except WeightsOvertaken:
            raise
        except RunError as error:
            if has_ended(error):
                raise EngineLost(str(error)) from error
            self._end()
            raise

    def _end(self) -> None:
        ray.kill(self._actor, no_restart=False)


class Membership:
    """Tells every episode runner which engines serve, also after Ray has restarted it."""

    def __init__(self, runners: Sequence[Any]) -> None:
        self._runners = runners
        self._serving: tuple[int, ...] = ()
        self._watches = [asyncio.create_task(self._watch(runner)) for runner in runners]

    async def tell(self, serving: Sequence[int]) -> None:
        """Returns when all runners know, except those that are being restarted."""
        self._serving = tuple(serving)
        await asyncio.gather(*(self._send(runner) for runner in self._runners))

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.wait(self._watches)

    async def _watch(self, runner: Any) -> None:
        while True:
            try:
                await wait_until_back("episode runner", runner)
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
