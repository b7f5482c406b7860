"""A policy and its critic as one trainer, so that the training loop need not know that there are two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.batching import in_order_of_training, plan_micro_batches
from rlflow.cluster.calls import RayTrainer, answer
from rlflow.concurrency import all_ended
from rlflow.roles import Mean, StagedWeights, StepOutcome
from rlflow.types import ReadyGroup, Span


class RayActorCritic:
    """Implements `roles.Trainer`: the critic values the groups first, then both learn from them side by side."""

    def __init__(self, policy: Sequence[Any], critic: Sequence[Any], micro_batch_tokens: int) -> None:
        """`policy` and `critic` are the ranks of either."""
        self._policy = RayTrainer(policy)
        self._critic = RayTrainer(critic, name="critic")
        self._critic_ranks = critic
        self._micro_batch_tokens = micro_batch_tokens

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        await self._value(groups)
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
        await all_ended([self._policy.write_snapshot(folder), self._critic.write_snapshot(folder / "critic")])

    async def load(self, folder: Path) -> None:
        await asyncio.gather(self._policy.load(folder), self._critic.load(folder / "critic"))

    async def offload(self) -> None:
        await asyncio.gather(self._policy.offload(), self._critic.offload())

    async def reload(self) -> None:
        await asyncio.gather(self._policy.reload(), self._critic.reload())

    async def _value(self, groups: Sequence[ReadyGroup]) -> None:
        """Hang the handles of the critic's values on the groups."""
        plans = plan_micro_batches(
            [group.episodes for group in groups], len(self._critic_ranks), self._micro_batch_tokens
        )
        handles: list[dict[int, object]] = [{} for _ in groups]
        waiting = []
        for rank, actor in enumerate(self._critic_ranks):
            places = in_order_of_training(plans[rank])
            call = actor.values.options(num_returns=len(places) + 1).remote(list(groups))
            done, *values = call if places else [call]
            for (group, episode), value in zip(places, values, strict=True):
                handles[group][episode] = value
            waiting.append(answer(f"critic rank {rank}", done, "values"))
        await asyncio.gather(*waiting)
        for group, found in zip(groups, handles, strict=True):
            group.values = [found[index] for index in range(len(group.episodes))]
