"""The actor that scores."""

from __future__ import annotations

from rlflow.config import RewardConfig
from rlflow.envs.base import RewardFunction
from rlflow.rewards import ScorerPool
from rlflow.types import Task, Verdict


class RewardWorker:
    """A ScorerPool behind a Ray actor. An actor that was restarted starts its pool at the first request."""

    def __init__(self, config: RewardConfig, function: RewardFunction | str) -> None:
        self._pool = ScorerPool(function, workers=config.workers, timeout_s=config.timeout_s)

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, task: Task, text: str) -> Verdict:
        return await self._pool.score(task, text)

    async def close(self) -> None:
        await self._pool.close()
