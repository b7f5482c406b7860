"""The rollout engine, with a clock on the parts of a weight update, and the other way to update it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.roles import StagedWeights
from rlflow.rollout.requests import GenerateRequest
from rlflow.weights.engine.messages import COMPARISON, Comparison
from rlflow.workers.engine.engine import RolloutEngine


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateTimes:
    """Seconds of one weight update of an engine."""

    total_s: float
    """From the call to sampling again."""
    pause_s: float
    """In which nothing was sampled."""
    vllm_s: float
    """The part of the pause in which vLLM ends its step and forgets the cache."""
    verify_s: float
    """The part of the pause in which the weights are compared with what was staged."""
    buckets_s: list[float]
    """Before the pause, the slowest worker lays each bucket out beside the model, between two of its steps."""

    @property
    def swap_s(self) -> float:
        """The rest of the pause: the weights are put in place and sampling goes on."""
        return self.pause_s - self.vllm_s - self.verify_s


class MeasuredEngine(RolloutEngine):
    _vllm_s = _verify_s = 0.0

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "worker_extension_cls": "weights_worker.MeasuredWorker"}

    async def _pause(self, version: int) -> float:
        started = time.perf_counter()
        try:
            return await super()._pause(version)
        finally:
            self._vllm_s = time.perf_counter() - started

    async def _verify(self, staged: StagedWeights) -> None:
        started = time.perf_counter()
        await super()._verify(staged)
        self._verify_s = time.perf_counter() - started

    async def update(self, staged: StagedWeights) -> UpdateTimes:
        started = time.perf_counter()
        pause_s = await self.load_weights(staged)
        total_s = time.perf_counter() - started
        buckets_s = max(await self._engine.collective_rpc("bench_prepared"), key=sum)
        return UpdateTimes(
            total_s=total_s, pause_s=pause_s, vllm_s=self._vllm_s, verify_s=self._verify_s, buckets_s=buckets_s
        )

    async def place(self, staged: StagedWeights) -> float:
        """Seconds of copying a version from the arena to where the slowest worker takes it from."""
        message = COMPARISON.dump_python(Comparison(staged=staged, columns=None), mode="json")
        return max(await self._engine.collective_rpc("bench_place", kwargs=message))

    async def reload(self, file: Path) -> float:
        """Load the weights from a file, and return the seconds in which nothing was sampled."""
        async with self._loading:
            paused_at_s = await self._pause(0)
            await self._engine.collective_rpc("bench_reload", args=(str(file),))
            await self._engine.resume_generation()
            return time.perf_counter() - paused_at_s


@asynccontextmanager
async def sampling(engine: RolloutEngine, requests: Iterable[GenerateRequest]) -> AsyncIterator[None]:
    """Keep these requests running, each again when it was answered, for as long as the block lasts."""

    async def repeat(request: GenerateRequest) -> None:
        while True:
            await engine.generate(request)

    running = [asyncio.create_task(repeat(each)) for each in requests]
    try:
        yield
        for task in running:
            if task.done():
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
