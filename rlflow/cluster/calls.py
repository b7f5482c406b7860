"""The driver's Protocols, answered by Ray actors. Ray's errors end here: what leaves is a WorkerError or the cause
itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.batching import in_order_of_training, plan_micro_batches
from rlflow.config import TrainerConfig
from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerError, WorkerLost, first_line
from rlflow.roles import StagedWeights, StepOutcome
from rlflow.runtime.concurrency import all_ended
from rlflow.runtime.derived import num_shares
from rlflow.types import PayloadRef, ReadyGroup, Span

DISK = "disk"
WATCH = "watch"
"""Concurrency group of an actor that is not asynchronous: a thread for the call that waits for its end."""

_open: dict[int, tuple[str, float]] = {}
"""Number of a call that is waited for -> what it is, and since when."""
_numbers = count()


def open_calls() -> list[str]:
    """What every actor is asked for at this moment: one line for each kind of call, the longest wait first."""
    waits: dict[str, list[float]] = {}
    now = time.monotonic()
    for what, since in _open.values():
        waits.setdefault(what, []).append(now - since)
    ranked = sorted(waits.items(), key=lambda item: -max(item[1]))
    return [f"{what}: {len(times)} calls open, the oldest for {max(times):.0f} s" for what, times in ranked]


async def answer(who: str, reference: Any, what: str = "") -> Any:
    """The result of a remote call; a cancelled wait cancels the call.

    `what` the actor is asked for shows in `open_calls`; calls that wait for its end by design have none.
    A ConfigError or RunError raised in the worker is raised as it is. WorkerLost: its process ended. PayloadLost: what
    it was to read, or has answered, was stored on a machine that is lost. Anything else is a WorkerError; all name
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
    except RayActorError as error:
        raise _lost(who, error) from error
    except ObjectLostError as error:
        raise PayloadLost(f"what the {who} answered was stored on a machine that is lost") from error
    except RayError as error:
        raise WorkerError(f"a call to the {who} was lost: {first_line(error)}") from error
    finally:
        _open.pop(number, None)


def _lost(who: str, error: RayActorError) -> WorkerLost:
    if isinstance(error, ActorUnavailableError):
        return WorkerLost(f"the {who} died, or its machine cannot be reached")  # Ray does not know yet
    return WorkerLost(f"the {who} died: {first_line(error)}")


async def ended(who: str, actor: Any) -> NoReturn:
    """Wait until the process of an actor ends that has the concurrency group `WATCH`; raises WorkerLost."""
    call = actor.__ray_call__.options(concurrency_group=WATCH).remote(_linger)
    try:
        await call  # a wait that is cancelled leaves the call alone, which takes no cancelling
    except RayActorError as error:
        raise _lost(who, error) from error
    raise AssertionError("this call never returns")


def call_on(node: str, function: Callable[..., Any], *arguments: object) -> Any:
    """The answer to come of a call that only this machine may take, however busy it is; `node` is Ray's id of it."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(*arguments)


def _linger(_: object) -> None:
    threading.Event().wait()


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
    ) -> None:
        """`policy_is_reference`: whether a policy with adapters is the reference too."""
        self._actors = actors
        self._config = config
        self._name = name
        self._refers_to_itself = policy_is_reference

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        await self.refer(groups)
        return await self._all("accumulate", list(groups), oldest_version)

    async def refer(self, groups: Sequence[ReadyGroup]) -> None:
        """Hang handles to the reference's log-probabilities on the groups that lack them, if this is the reference."""
        lacking = [group for group in groups if group.references is None]
        if not (self._refers_to_itself and lacking):
            return
        for group, references in zip(lacking, await self.per_token("references", lacking), strict=True):
            group.references = references

    async def per_token(self, method: str, groups: Sequence[ReadyGroup]) -> list[list[object]]:
        """For each group, handles to what `method` of the ranks says of its episodes."""
        episodes = [group.episodes for group in groups]
        plans = plan_micro_batches(episodes, num_shares(self._config), self._config.micro_batch_tokens)
        handles: list[dict[int, object]] = [{} for _ in groups]
        waiting = []
        for rank, actor in enumerate(self._actors):
            share, others = divmod(rank, self._config.tensor_parallel)
            places = [] if others else in_order_of_training(plans[share])
            call = getattr(actor, method).options(num_returns=len(places) + 1).remote(list(groups))
            done, *found = call if places else [call]
            for (group, episode), handle in zip(places, found, strict=True):
                handles[group][episode] = handle
            waiting.append(answer(f"{self._name} rank {rank}", done, method))
        await asyncio.gather(*waiting)
        return [
            [found[index] for index in range(len(group.episodes))] for group, found in zip(groups, handles, strict=True)
        ]

    async def step(self) -> StepOutcome:
        outcomes = await self._all("step")
        first: StepOutcome = outcomes[0]
        first.spans = [span for outcome in outcomes for span in outcome.spans]
        return first

    async def stage_weights(self, version: int) -> StagedWeights:
        staged = await self._all("stage_weights", version)
        return staged[0]

    async def snapshot(self) -> None:
        await self._all("snapshot")

    async def write_snapshot(self, folder: Path) -> None:
        writing = [
            answer(
                f"{self._name} rank {rank}",
                actor.write_snapshot.options(concurrency_group=DISK).remote(folder),
                "write_snapshot",
            )
            for rank, actor in enumerate(self._actors)
        ]
        await all_ended(writing)

    async def load(self, folder: Path) -> None:
        await self._all("load", folder)

    async def offload(self) -> None:
        await self._all("offload")

    async def reload(self) -> None:
        await self._all("reload")

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        """The answer of each rank, in order."""
        calls = [
            answer(f"{self._name} rank {rank}", getattr(actor, method).remote(*arguments), method)
            for rank, actor in enumerate(self._actors)
        ]
        return list(await asyncio.gather(*calls))


class RayReference:
    """The frozen reference."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        references = self._actor.logprobs.options(num_returns=len(payloads) + 1).remote(*payloads)
        done, *logprobs = references
        await answer("reference", done, "log-probabilities")
        return logprobs
