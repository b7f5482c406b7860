"""Calls to Ray actors, and the frozen models behind the driver's Protocol. The trainer is in `trainers.py`.

    one call for each rank -> answer -> the ranks' answers, or a WorkerError that names the rank

Ray's errors end in `answer`: what leaves it is a WorkerError, or a ConfigError or RunError as the worker raised it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
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

from rlflow.errors import ConfigError, PayloadLost, RunError, WorkerError, WorkerLost, first_line
from rlflow.runtime.concurrency import wait_until_all_ended
from rlflow.types import PayloadRef

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
