"""Routing replies over the rollout engines: which one samples, in how many calls, and what happens when one is lost.

GenerateRequest -> slices of a reply, one engine call each -> Completion
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlflow.errors import EngineLost, RunError
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.runtime.deadlines import within

MAX_KEYS = 4096
"""Prefix keys remembered; the least recently used is forgotten first."""
MAX_LEAD = 8
"""Outstanding requests that a key's engine may have beyond twice those of the least loaded, before the key moves."""
SLICE_TOKENS = 256
"""Tokens sampled by one engine call at most. What a lost engine takes along is bounded by it, and so is the time that
an engine needs to drain. vLLM's prefix cache holds the earlier slices, so that a cut costs one step."""
MAX_LOSSES = 5
"""Engine calls in a row that may give a reply no token before the reply is given up."""


class _RemoteGenerate(Protocol):
    def remote(self, request: GenerateRequest, /) -> Awaitable[Completion]: ...


class EngineHandle(Protocol):
    """A Ray actor handle of an engine, or anything shaped like it."""

    @property
    def generate(self) -> _RemoteGenerate: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Transport:
    """What the client has to know about remote calls."""

    cancel: Callable[[Awaitable[Completion]], None]
    """Given the call whose caller was cancelled."""
    is_lost: Callable[[Exception], bool]
    """Whether a failed call means that its engine is gone, so that another one may answer."""


def slice_seed(seed: int, num_sampled: int) -> int:
    """Seed of the slice that starts after `num_sampled` tokens of a reply; 31 bits. The first slice keeps the reply's.

    Example: slice_seed(7, 0) == 7; slice_seed(7, 256) == 7 * 69069 + 256
    """
    return (seed * 69069 + num_sampled) & 0x7FFFFFFF if num_sampled else seed


def next_slice(request: GenerateRequest, reply: Completion) -> GenerateRequest:
    """What to ask for after the tokens of `reply`."""
    num_sampled = len(reply.ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + reply.ids,
        seed=None if request.seed is None else slice_seed(request.seed, num_sampled),
        max_new_tokens=min(SLICE_TOKENS, request.max_new_tokens - num_sampled),
    )


class EngineClient:
    """Sends each request to the serving engine with the fewest outstanding ones.

    Requests with the same prefix key stay on one engine, whose cache holds their prompt, unless it is much more loaded.
    An engine that is lost gets nothing until `set_serving` names it again.
    """

    def __init__(self, engines: Sequence[EngineHandle], transport: Transport, patience_s: float) -> None:
        """All engines serve at first. `patience_s` is how long a request waits while none does."""
        if not engines:
            raise ValueError("engines must not be empty")
        self._engines = list(engines)
        self._transport = transport
        self._patience_s = patience_s
        self._outstanding = [0] * len(engines)
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._serving: set[int] = set()
        self._has_engine = asyncio.Event()
        self.set_serving(range(len(engines)))

    @property
    def outstanding(self) -> list[int]:
        """Requests under way, by engine."""
        return list(self._outstanding)

    @property
    def is_served(self) -> bool:
        """Whether any engine takes requests."""
        return bool(self._serving)

    def set_serving(self, engines: Collection[int]) -> None:
        """From now on, requests that name no engine go to these only. What is under way stays where it is."""
        self._serving = set(engines)
        assert self._serving <= set(range(len(self._engines))), f"no such engine: {engines}"
        self._note_serving()

    async def generate(
        self, request: GenerateRequest, sampled: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Sample one reply; `sampled` is told of each slice as it comes.

        An engine's loss costs the tokens of the slice under way only. Raises EngineLost when the engine that the
        request names is lost, RunError when MAX_LOSSES calls in a row gave nothing, DeadlineError when no engine serves
        for `patience_s`, and what an engine raised.
        """
        reply = Completion(ids=[], logprobs=[], versions=[], finish_reason="length")
        losses, last = 0, None
        while True:
            last = await self._route(request, last)
            part = await self._call(last, request, next_slice(request, reply))
            if part is None or (part.finish_reason == "abort" and not part.ids):
                losses += 1
                if losses == MAX_LOSSES:
                    raise RunError(f"{losses} engine calls in a row gave a reply no token: the engines were lost")
                continue
            losses = 0
            if sampled is not None:
                sampled(part)
            asked = min(SLICE_TOKENS, request.max_new_tokens - len(reply.ids))
            _extend(reply, part)
            # An engine that stops short of what it was asked for has no room left.
            is_cut_off = part.finish_reason == "length" and len(part.ids) < asked
            if part.finish_reason == "stop" or is_cut_off or len(reply.ids) >= request.max_new_tokens:
                reply.finish_reason = "stop" if part.finish_reason == "stop" else "length"
                return reply

    async def _call(self, index: int, request: GenerateRequest, asked: GenerateRequest) -> Completion | None:
        """One engine call; None when the engine was lost and another one may be tried."""
        self._outstanding[index] += 1
        call = self._engines[index].generate.remote(asked)
        try:
            return await call
        except asyncio.CancelledError:
            self._transport.cancel(call)
            raise
        except Exception as error:
            if not self._transport.is_lost(error):
                raise
            if request.engine is not None:
                raise EngineLost(
                    f"rollout engine {index} was lost, and with it the version that this request asked for"
                ) from error
            self._serving.discard(index)
            self._note_serving()
            return None
        finally:
            self._outstanding[index] -= 1

    async def _route(self, request: GenerateRequest, last: int | None) -> int:
        """The engine for the next slice; `last` answered the one before."""
        if request.engine is not None:
            return request.engine
        while not self._serving:
            await within(
                "waiting for a rollout engine that serves",
                self._patience_s,
                self._has_engine.wait(),
                "the engines died, or took longer than deadlines.start_s to come back",
            )
        least = min(sorted(self._serving), key=lambda index: self._outstanding[index])
        key = request.prefix_key
        home = last if last is not None else self._homes.get(key, least) if key is not None else least
        if home not in self._serving or self._outstanding[home] > 2 * self._outstanding[least] + MAX_LEAD:
            home = least
        if key is not None and last is None:
            self._remember(key, home)
        return home

    def _remember(self, key: str, home: int) -> None:
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_KEYS:
            self._homes.popitem(last=False)

    def _note_serving(self) -> None:
        if self._serving:
            self._has_engine.set()
        else:
            self._has_engine.clear()


def _extend(reply: Completion, part: Completion) -> None:
    reply.ids += part.ids
    reply.logprobs += part.logprobs
    reply.versions += part.versions
