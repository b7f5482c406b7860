"""Rollout engines as Ray actors: how one is watched and brought back, and how the episode runners learn who serves.

The rules are in `rlflow.rollout.fleet`; this module does only what needs Ray.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn

import ray

from rlflow.cluster.calls import answer, has_ended, wait_until_back
from rlflow.cluster.runners import tell
from rlflow.config import DeadlinesConfig
from rlflow.errors import DeadlineError, EngineLost, RunError, WeightsOvertaken, WorkerError
from rlflow.roles import StagedWeights
from rlflow.runtime.deadlines import within
from rlflow.workers.engine.engine import RolloutEngine


class EngineActor(RolloutEngine):
    """A rollout engine that says when it ends. It leads a group, because vLLM does not notice that its parent was
    killed, and would keep its memory forever."""

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
        return await self._vital(within(f"{stage} of {self._name}", seconds, answer(self._name, call, what)))

    async def _vital(self, answering: Awaitable[Any]) -> Any:
        """The answer to a call. An engine whose call failed is killed, because its state may be inconsistent; one that
        did not answer in time is lost as if it had died."""
        try:
            return await answering
        except WeightsOvertaken:
            raise
        except RunError as error:
            if not has_ended(error):
                self._end()
            if has_ended(error) or isinstance(error, DeadlineError):
                raise EngineLost(str(error)) from error
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
        # If it dies, its watch tells it when it is back.
        await tell(runner, "which engines serve", runner.set_serving.remote(self._serving))
