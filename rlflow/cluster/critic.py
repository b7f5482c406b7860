"""A policy and its critic as one trainer, so that the training loop need not know that there are two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.batching import in_order_of_training, plan_micro_batches
from rlflow.cluster.calls import RayTrainer, answer
from rlflow.config import TrainerConfig, num_shares
from rlflow.roles import Mean, StagedWeights, StepOutcome
from rlflow.types import ReadyGroup, Span


class RayActorCritic:
    """Implements `roles.Trainer`: the critic values the groups first, then both learn from them side by side."""

    def __init__(self, policy: Sequence[Any], critic: Sequence[Any], trainer: TrainerConfig) -> None:
        """`policy` and `critic` are the ranks of either."""
        self._policy = RayTrainer(policy)
        self._critic = RayTrainer(critic, name="critic")
        self._critic_ranks = critic
        self._trainer = trainer

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

    async def save(self, folder: Path) -> None:
        await asyncio.gather(self._policy.save(folder), self._critic.save(folder / "critic"))

    async def load(self, folder: Path) -> None:
        await asyncio.gather(self._policy.load(folder), self._critic.load(folder / "critic"))

    async def _value(self, groups: Sequence[ReadyGroup]) -> None:
        """Hang the handles of the critic's values on the groups."""
        trainer = self._trainer
        episodes = [group.episodes for group in groups]
        plans = plan_micro_batches(episodes, num_shares(trainer), trainer.micro_batch_tokens)
        handles: list[dict[int, object]] = [{} for _ in groups]
        waiting = []
        for rank, actor in enumerate(self._critic_ranks):
            share, others = divmod(rank, trainer.tensor_parallel)
            places = [] if others else in_order_of_training(plans[share])
            call = actor.values.options(num_returns=len(places) + 1).remote(list(groups))
            done, *values = call if places else [call]
            for (group, episode), value in zip(places, values, strict=True):
                handles[group][episode] = value
            waiting.append(answer(f"critic rank {rank}", done, "values"))
        await asyncio.gather(*waiting)
        for group, found in zip(groups, handles, strict=True):
            group.values = [found[index] for index in range(len(group.episodes))]
