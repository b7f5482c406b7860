"""The actor that scores."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.config import RewardConfig
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.pool import ScorerPool
from rlflow.types import Transcript, Verdict


class RewardWorker:
    """A ScorerPool behind a Ray actor. An actor that was restarted starts its pool at the first request."""

    def __init__(self, config: RewardConfig, rewards: Sequence[ChosenReward]) -> None:
        self._pool = ScorerPool(rewards, workers=config.workers, timeout_s=config.timeout_s)

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, transcript: Transcript) -> Verdict:
        return await self._pool.score(transcript)

    async def close(self) -> None:
        await self._pool.close()
