"""The ranks of a trainer, and of a critic, behind the driver's Protocol.

    ReadyGroups -> a share for each rank -> one call for each rank -> their answers

The driver plans who trains which episodes, once, and sends each rank what is its own.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlflow.batching.plan import in_order_of_training, plan_micro_batches
from rlflow.batching.shares import RankWork, Share, share_of, shares
from rlflow.cluster.calls import DISK, answer
from rlflow.config import TrainerConfig
from rlflow.groups.silent import by_turns
from rlflow.roles import PROXIMAL, REFERENCE, Mean, StagedWeights, StepOutcome
from rlflow.rollout.requests import ProbePrompt
from rlflow.runtime.clock import as_seen_here, now
from rlflow.runtime.concurrency import wait_until_all_ended
from rlflow.runtime.derived import num_shares, ranks_per_share
from rlflow.types import FloatArray, ReadyGroup, Sample, Span

T = TypeVar("T")


class RayTrainer:
    """The ranks of one trainer; every call goes to all of them, because they meet in collectives.

    Its actors have the concurrency group `DISK`: a thread that writes while another one trains.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        config: TrainerConfig,
        *,
        name: str = "trainer",
        policy_is_reference: bool = False,
        recomputes: bool = False,
        needs_log_ratios: bool = False,
        is_silent: Callable[[ReadyGroup], bool] = lambda _: False,
    ) -> None:
        """`policy_is_reference`: the policy with its adapters off is the reference. `recomputes`: see `derived`.
        `needs_log_ratios`: see `Traits`. `is_silent`: whether no gradient comes from a group."""
        self._actors = actors
        self._config = config
        self._name = name
        self._policy_is_reference = policy_is_reference
        self._recomputes = recomputes or needs_log_ratios
        self._needs_log_ratios = needs_log_ratios
        self._is_silent = is_silent
        self._num_silent = 0
        """Groups without a gradient since the last update."""
        self._in_turn = threading.Lock()
        """Held while the ranks are called, so that all of them get their calls in the same order."""

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        lacking = [group for group in groups if REFERENCE not in group.frozen]
        if self._policy_is_reference and lacking:
            await self._ask("references", lacking, REFERENCE)
        if self._recomputes:
            await self._ask("logprobs", groups, PROXIMAL)
        if self._needs_log_ratios:
            ranks = len(self._actors)
            found = await self._each("log_ratios", lambda: [(groups[rank::ranks],) for rank in range(ranks)])
            for index, group in enumerate(groups):
                group.log_ratios = found[index % len(found)][index // len(found)]

    async def _ask(self, method: str, groups: Sequence[ReadyGroup], name: str) -> None:
        for group, logprobs in zip(groups, await self.per_token(method, groups), strict=True):
            group.frozen[name] = logprobs

    async def measure(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        """Tell the ranks the groups of a step, because the advantages of all of its tokens are whitened together."""
        await self._each("measure", lambda: self._to_ranks(self._shares(groups), oldest_version))

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        asked_s = now()
        spans = await self._each("accumulate", lambda: self._to_ranks(self._work(groups), oldest_version))
        return [each for span in spans for each in as_seen_here([span], asked_s)]

    async def per_token(self, method: str, groups: Sequence[ReadyGroup]) -> list[list[object]]:
        """What `method` of the ranks says of each episode: for each group, one handle an episode."""
        handles: list[dict[int, object]] = [{} for _ in groups]
        waiting = []
        for rank, (places, call) in enumerate(await self._called(lambda: self._ask_ranks(method, groups))):
            done, *found = call if places else [call]
            for (group, episode), handle in zip(places, found, strict=True):
                handles[group][episode] = handle
            waiting.append(self._answer(rank, done, method))
        await asyncio.gather(*waiting)
        return [
            [found[index] for index in range(len(group.episodes))] for group, found in zip(groups, handles, strict=True)
        ]

    def _ask_ranks(self, method: str, groups: Sequence[ReadyGroup]) -> list[tuple[list[tuple[int, int]], Any]]:
        """For each rank: the (group, episode) pairs that it returns values for, and what its call returned."""
        plans = plan_micro_batches(
            [group.episodes for group in groups], num_shares(self._config), self._config.micro_batch_tokens
        )
        own, found = [share_of(groups, each) for each in plans], []
        for rank, actor in enumerate(self._actors):
            share, others = divmod(rank, ranks_per_share(self._config))
            places = [] if others else in_order_of_training(plans[share])
            call = getattr(actor, method).options(num_returns=len(places) + 1)
            found.append((places, call.remote(own[share])))
        return found

    def _shares(self, groups: Sequence[ReadyGroup]) -> list[Share]:
        return shares(groups, num_shares(self._config), self._config.micro_batch_tokens)

    def _work(self, groups: Sequence[ReadyGroup]) -> list[RankWork]:
        """What each share's ranks do with `groups`."""
        loud: list[ReadyGroup] = []
        silent: list[ReadyGroup] = []
        for group in groups:
            (silent if self._is_silent(group) else loud).append(group)
        observed, passed_over = by_turns(silent, self._num_silent)
        self._num_silent += len(silent)
        tokens = sum(group.num_tokens for group in groups)
        return [
            RankWork(trained=one, observed=two, passed_over=three, num_groups=len(groups), num_tokens=tokens)
            for one, two, three in zip(*map(self._shares, (loud, observed, passed_over)), strict=True)
        ]

    def _to_ranks(self, of_shares: Sequence[object], *arguments: object) -> list[tuple[object, ...]]:
        """The arguments of each rank, of which neighbours may have the same share."""
        neighbours = ranks_per_share(self._config)
        return [(of_shares[rank // neighbours], *arguments) for rank in range(len(self._actors))]

    async def probe_prompts(self) -> list[ProbePrompt]:
        """Prompts of random tokens that show how this model computes; see `gate`."""
        return await answer("trainer", self._actors[0].probe_prompts.remote())

    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Log-probabilities [L] of each sample under the current policy."""
        found: list[list[FloatArray]] = await self._all("score", list(samples))
        return found[0]

    async def step(self, *, is_last: bool) -> StepOutcome:
        asked_s = now()
        outcomes = await self._all("step", is_last)
        self._num_silent = 0
        first: StepOutcome = outcomes[0]
        first.spans = [span for outcome in outcomes for span in as_seen_here(outcome.spans, asked_s)]
        first.memory_peaks = [peak for outcome in outcomes for peak in outcome.memory_peaks]
        return first

    async def stage_weights(self, version: int) -> StagedWeights:
        asked_s = now()
        staged: list[StagedWeights] = await self._all("stage_weights", version)
        return replace(staged[0], spans=tuple(as_seen_here(staged[0].spans, asked_s)))

    async def snapshot(self) -> None:
        await self._all("snapshot")

    async def write_snapshot(self, folder: Path) -> dict[str, str]:
        writing = [actor.write_snapshot.options(concurrency_group=DISK).remote(folder) for actor in self._actors]
        answers = [self._answer(rank, call, "write_snapshot") for rank, call in enumerate(writing)]
        return {name: digest for found in await wait_until_all_ended(answers) for name, digest in found.items()}

    async def load(self, folder: Path) -> None:
        await self._all("load", folder)

    async def offload(self) -> None:
        await self._all("offload")

    async def reload(self) -> None:
        await self._all("reload")

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        """The answer of each rank, in order, to the same call."""
        return await self._each(method, lambda: [arguments] * len(self._actors))

    async def _each(self, method: str, arguments: Callable[[], Sequence[tuple[object, ...]]]) -> list[Any]:
        """The answer of each rank, in order, to a call with arguments of its own."""

        def ask() -> list[Any]:
            return [getattr(actor, method).remote(*own) for actor, own in zip(self._actors, arguments(), strict=True)]

        calls = await self._called(ask)
        return await asyncio.gather(*(self._answer(rank, call, method) for rank, call in enumerate(calls)))

    async def _called(self, ask: Callable[[], list[T]]) -> list[T]:
        """What `ask` returns, which calls every rank.

        It runs in a thread, because planning for many ranks and calling them would hold up the loop. It calls them all
        even if the wait for it is cancelled: a call that only some ranks have would leave these waiting for the others.
        """

        def in_turn() -> list[T]:
            with self._in_turn:
                return ask()

        return await asyncio.to_thread(in_turn)

    async def _answer(self, rank: int, call: Any, what: str) -> Any:
        return await answer(f"{self._name} rank {rank}", call, what)


class RayActorCritic:
    """A policy and its critic as one trainer, so that the training loop need not know that there are two.

    The critic values the groups first; then both learn from them side by side.
    """

    def __init__(self, policy: RayTrainer, critic: RayTrainer) -> None:
        self._policy = policy
        self._critic = critic

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        # Both, because advantages come from rewards that may hold the distance to the reference.
        preparing = self._policy.prepare(groups, oldest_version)
        # The critic's thread reads copies, because the policy adds handles to the groups meanwhile.
        copies = [replace(group, frozen=dict(group.frozen)) for group in groups]
        found, _ = await asyncio.gather(self._critic.per_token("values", copies), preparing)
        for group, values in zip(groups, found, strict=True):
            group.values = values
        await self._policy.measure(groups, oldest_version)

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        spans = await asyncio.gather(
            self._policy.accumulate(groups, oldest_version), self._critic.accumulate(groups, oldest_version)
        )
        return [span for part in spans for span in part]

    async def step(self, *, is_last: bool) -> StepOutcome:
        """The policy's, with the critic's metrics; the critic may skip an update of its own."""
        outcome, critic = await asyncio.gather(self._policy.step(is_last=is_last), self._critic.step(is_last=is_last))
        outcome.metrics |= critic.metrics
        outcome.spans += critic.spans
        outcome.metrics["critic/update_skipped"] = Mean(total=float(not critic.applied), count=1)
        return outcome

    async def stage_weights(self, version: int) -> StagedWeights:
        return await self._policy.stage_weights(version)

    async def snapshot(self) -> None:
        await asyncio.gather(self._policy.snapshot(), self._critic.snapshot())

    async def write_snapshot(self, folder: Path) -> dict[str, str]:
        policy, critic = await wait_until_all_ended(
            [self._policy.write_snapshot(folder), self._critic.write_snapshot(folder / "critic")]
        )
        return policy | {f"critic/{name}": digest for name, digest in critic.items()}

    async def load(self, folder: Path) -> None:
        await asyncio.gather(self._policy.load(folder), self._critic.load(folder / "critic"))

    async def offload(self) -> None:
        await asyncio.gather(self._policy.offload(), self._critic.offload())

    async def reload(self) -> None:
        await asyncio.gather(self._policy.reload(), self._critic.reload())
