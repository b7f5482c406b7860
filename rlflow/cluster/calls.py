"""The driver's Protocols, answered by Ray actors. Ray's errors end here: what leaves is a WorkerError or the cause
itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlflow.batching import in_order_of_training, plan_micro_batches
from rlflow.concurrency import all_ended
from rlflow.config import TrainerConfig, num_shares
from rlflow.errors import ConfigError, RunError, WorkerError, first_line
from rlflow.roles import StagedWeights, StepOutcome
from rlflow.types import GroupOrder, Message, PayloadRef, PlayedGroup, ReadyGroup, Span

DISK = "disk"

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
    A ConfigError or RunError raised in the worker is raised as it is, anything else as WorkerError naming `who`.
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
        raise WorkerError(f"the {who} failed: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise WorkerError(f"the {who} died: {first_line(error)}") from error
    except RayError as error:
        raise WorkerError(f"a call to the {who} was lost: {first_line(error)}") from error
    finally:
        _open.pop(number, None)


class RayRunners:
    """Groups go to the episode runner that has the fewest."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._playing = [0] * len(actors)

    async def play(self, order: GroupOrder) -> PlayedGroup:
        index = self._playing.index(min(self._playing))
        self._playing[index] += 1
        # One return value an episode: the driver owns the payloads, so they outlive the runner, and never opens them.
        call = self._actors[index].play.options(num_returns=order.num_episodes + 1)
        try:
            group, *payloads = call.remote(order)
            played: PlayedGroup = await answer("episode runner", group, "play")
        finally:
            self._playing[index] -= 1
        played.payloads = payloads
        return played

    async def cancel_stale(self, oldest_version: int) -> None:
        calls = [
            answer("episode runner", actor.cancel_stale.remote(oldest_version), "cancel stale groups")
            for actor in self._actors
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            # A runner that died has lost its groups: their own calls fail.
            if isinstance(result, BaseException) and not isinstance(result, WorkerError):
                raise result

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        return await answer("episode runner", self._actors[0].transcript.remote(payload), "transcript")

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> None:
        await answer("episode runner", self._actors[0].save_payloads.remote(path, *payloads), "save")

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]:
        # A first value beside the payloads keeps the number of return values above one, and tells success.
        call = self._actors[0].load_payloads.options(num_returns=count + 1)
        done, *payloads = call.remote(path)
        await answer("episode runner", done, "load")
        return payloads


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
        refers_to_itself: bool = False,
    ) -> None:
        """`refers_to_itself`: whether a policy with adapters is the reference too."""
        self._actors = actors
        self._config = config
        self._name = name
        self._refers_to_itself = refers_to_itself

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
