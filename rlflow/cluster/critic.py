"""A policy and its critic as one trainer, so that the training loop need not know that there are two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rlflow.cluster.calls import RayTrainer
from rlflow.roles import Mean, StagedWeights, StepOutcome
from rlflow.runtime.concurrency import wait_until_all_ended
from rlflow.types import ReadyGroup, Span


class RayActorCritic:
    """Implements `roles.Trainer`: the critic values the groups first, then both learn from them side by side."""

    def __init__(self, policy: RayTrainer, critic: RayTrainer) -> None:
        self._policy = policy
        self._critic = critic

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        # Before either learns: the critic, too, may learn from rewards that hold the distance to the reference.
        await asyncio.gather(self._value(groups), self._policy.refer(groups))
        spans = await asyncio.gather(
            self._policy.accumulate(groups, oldest_version), self._critic.accumulate(groups, oldest_version)
        )
        for group in groups:
            group.values = None
        return [span for part in spans for span in part]

    async def step(self) -> StepOutcome:
        """The policy's, with the critic's metrics; the critic may skip an update of its own."""
        outcome, critic = await asyncio.gather(self._policy.step(), self._critic.step())
        outcome.metrics |= critic.metrics
        outcome.spans += critic.spans
        outcome.metrics["critic/update_skipped"] = Mean(total=float(not critic.applied), count=1)
        return outcome

    async def stage_weights(self, version: int) -> StagedWeights:
        return await self._policy.stage_weights(version)

    async def snapshot(self) -> None:
        await asyncio.gather(self._policy.snapshot(), self._critic.snapshot())

    async def write_snapshot(self, folder: Path) -> None:
        await wait_until_all_ended(
            [self._policy.write_snapshot(folder), self._critic.write_snapshot(folder / "critic")]
        )

    async def load(self, folder: Path) -> None:
        await asyncio.gather(self._policy.load(folder), self._critic.load(folder / "critic"))

    async def offload(self) -> None:
        await asyncio.gather(self._policy.offload(), self._critic.offload())

    async def reload(self) -> None:
        await asyncio.gather(self._policy.reload(), self._critic.reload())

    async def _value(self, groups: Sequence[ReadyGroup]) -> None:
        """Hang the handles of the critic's values on the groups."""
        for group, values in zip(groups, await self._critic.per_token("values", groups), strict=True):
            group.values = values
