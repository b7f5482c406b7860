"""Calls to Ray actors, and the trainer and frozen models behind the driver's Protocols.

    roles.Trainer -> one call for each rank -> answer -> the ranks' answers, or a WorkerError that names the rank

Ray's errors end in `answer`: what leaves it is a WorkerError, or a ConfigError or RunError as the worker raised it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.batching.plan import in_order_of_training, plan_micro_batches
from rlflow.config import TrainerConfig
from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerError, WorkerLost, first_line
from rlflow.roles import PROXIMAL, REFERENCE, Mean, StagedWeights, StepOutcome
from rlflow.rollout.requests import ProbePrompt
from rlflow.runtime.clock import as_seen_here, now
from rlflow.runtime.concurrency import wait_until_all_ended
from rlflow.runtime.derived import num_shares, ranks_per_share
from rlflow.types import FloatArray, PayloadRef, ReadyGroup, Sample, Span

DISK = "disk"
WATCH = "watch"
"""Concurrency group of a synchronous actor: a thread for the call that waits for the actor's end."""

_open: dict[int, tuple[str, float]] = {}
"""Number of an open call -> what it is, and since when."""
_numbers = count()
ENDED = (RayActorError, OutOfMemoryError)
"""What Ray raises when an actor's process has ended."""


def open_calls() -> list[str]:
    """The calls that are being waited for: one line for each kind, the longest wait first."""
    waits: dict[str, list[float]] = {}
    now_s = time.monotonic()
    for what, since in _open.values():
        waits.setdefault(what, []).append(now_s - since)
    ranked = sorted(waits.items(), key=lambda item: -max(item[1]))
    return [f"{what}: {len(times)} calls open, the oldest for {max(times):.0f} s" for what, times in ranked]


async def answer(who: str, reference: Any, what: str = "") -> Any:
    """The result of a remote call; a cancelled wait cancels the call.

    `what` the actor is asked to do shows in `open_calls`; calls that wait by design have none.
    Raises a ConfigError or RunError of the worker as it is; WorkerLost when its process ended; PayloadLost when what
    it was to read, or has answered, was stored on a machine that is lost; WorkerError for anything else. All three name
    `who`.
    """
    number = next(_numbers)
    if what:
        _open[number] = (f"{who}, {what}", time.monotonic())
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError | RunError):
            raise cause from None
        if isinstance(cause, ObjectLostError):
            raise PayloadLost(f"what the {who} was to read was stored on a machine that is lost") from error
        raise WorkerError(f"the {who} failed: {type(cause).__name__}: {cause}") from error
    except ENDED as error:
        raise _lost(who, error) from error
    except ObjectLostError as error:
        raise PayloadLost(f"what the {who} answered was stored on a machine that is lost") from error
    except RayError as error:
        raise WorkerError(f"a call to the {who} was lost: {first_line(error)}") from error
    finally:
        _open.pop(number, None)


def _lost(who: str, error: RayError) -> WorkerLost:
    if isinstance(error, OutOfMemoryError):
        return WorkerLost(
            f"Ray killed the {who}, because its machine ran out of memory: {first_line(error)}; give the run a machine "
            "with more, or end what else takes it; trainer.micro_batch_tokens and rollout.kv_cache_gb are what it "
            "needs most for"
        )
    if isinstance(error, ActorUnavailableError):
        return WorkerLost(f"the {who} died, or its machine cannot be reached")  # Ray does not know yet
    return WorkerLost(f"the {who} died: {first_line(error)}")


def has_ended(error: BaseException) -> bool:
    """Whether an error that `answer` raised says that the actor's process ended, and not only a worker behind it."""
    return isinstance(error.__cause__, ENDED)


async def wait_until_ended(who: str, actor: Any) -> NoReturn:
    """Wait until the process of an actor ends that has the concurrency group `WATCH`; raises WorkerLost."""
    call = actor.__ray_call__.options(concurrency_group=WATCH).remote(lambda _: threading.Event().wait())
    try:
        await call  # when the wait is cancelled, the call goes on: it cannot be cancelled
    except ENDED as error:
        raise _lost(who, error) from error
    raise AssertionError("this call never returns")


async def wait_until_back(who: str, actor: Any, what: str = "") -> None:
    """Wait until Ray has started, or restarted, the process of an actor. Raises WorkerError when it cannot."""
    # Retried, because a process that Ray is restarting does not answer yet.
    await answer(who, actor.__ray_ready__.options(max_task_retries=-1).remote(), what)


def call_on(node: str, function: Callable[..., Any], *arguments: object) -> Any:
    """A call that only this machine may take, however busy it is; `node` is Ray's id of it. Returns the reference."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(*arguments)


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
    ) -> None:
        """`policy_is_reference`: the policy with its adapters off is the reference. `recomputes`: see `derived`.
        `needs_log_ratios`: see `Traits`."""
        self._actors = actors
        self._config = config
        self._name = name
        self._policy_is_reference = policy_is_reference
        self._recomputes = recomputes or needs_log_ratios
        self._needs_log_ratios = needs_log_ratios

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        lacking = [group for group in groups if REFERENCE not in group.frozen]
        if self._policy_is_reference and lacking:
            await self._ask("references", lacking, REFERENCE)
        if self._recomputes:
            await self._ask("logprobs", groups, PROXIMAL)
        if self._needs_log_ratios:
            found = await self._all("log_ratios", list(groups))
            for index, group in enumerate(groups):
                group.log_ratios = found[index % len(found)][index // len(found)]

    async def _ask(self, method: str, groups: Sequence[ReadyGroup], name: str) -> None:
        for group, logprobs in zip(groups, await self.per_token(method, groups), strict=True):
            group.frozen[name] = logprobs

    async def measure(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        """Tell the ranks the groups of a step, because the advantages of all of its tokens are whitened together."""
        await self._all("measure", list(groups), oldest_version)

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        asked_s = now()
        spans = await self._all("accumulate", list(groups), oldest_version)
        return [each for span in spans for each in as_seen_here([span], asked_s)]

    async def per_token(self, method: str, groups: Sequence[ReadyGroup]) -> list[list[object]]:
        """What `method` of the ranks says of each episode: for each group, one handle an episode."""
        episodes = [group.episodes for group in groups]
        plans = plan_micro_batches(episodes, num_shares(self._config), self._config.micro_batch_tokens)
        handles: list[dict[int, object]] = [{} for _ in groups]
        waiting = []
        for rank, actor in enumerate(self._actors):
            share, others = divmod(rank, ranks_per_share(self._config))
            places = [] if others else in_order_of_training(plans[share])
            call = getattr(actor, method).options(num_returns=len(places) + 1).remote(list(groups))
            done, *found = call if places else [call]
            for (group, episode), handle in zip(places, found, strict=True):
                handles[group][episode] = handle
            waiting.append(self._answer(rank, done, method))
        await asyncio.gather(*waiting)
        return [
            [found[index] for index in range(len(group.episodes))] for group, found in zip(groups, handles, strict=True)
        ]

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
        """The answer of each rank, in order."""
        calls = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return await asyncio.gather(*(self._answer(rank, call, method) for rank, call in enumerate(calls)))

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
        found, _ = await asyncio.gather(self._critic.per_token("values", groups), preparing)
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


class RayFrozenModel:
    """The ranks of a frozen model, among which the payloads of a call are divided."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self._name = name
        self._actors = actors

    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        found: list[object] = [None] * len(payloads)
        waiting = []
        for rank, actor in enumerate(self._actors):
            own = list(payloads[rank :: len(self._actors)])
            call = actor.logprobs.options(num_returns=len(own) + 1).remote(own)
            done, *found[rank :: len(self._actors)] = call if own else [call]
            waiting.append(answer(f"{self._name} rank {rank}", done, "log-probabilities"))
        # A call that only some ranks have taken would leave these waiting for the others, so none is cancelled alone.
        await asyncio.shield(asyncio.ensure_future(wait_until_all_ended(waiting)))
        return found
