"""Which engine samples a reply, and what happens when an engine is lost.

    GenerateRequest -> generate at one engine, then go_on for part after part -> Completion

Rules: a reply stays at its engine, in one request that keeps its cache. When the engine is lost or gives it back,
another one goes on after the tokens that came; so a lost engine costs one part and never a token that was returned.
Requests with the same prefix key share an engine. A request that names an engine is answered by that engine or fails.

Example: a reply of 600 tokens is three calls (256, 256, 88). If the engine dies in the second call, another engine
samples on after the first 256 tokens.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlflow.errors import EngineLost
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.runtime.deadlines import within

MAX_KEYS = 4096
"""Prefix keys remembered; the least recently used is forgotten first."""
MAX_LEAD = 8
"""A key moves to another engine when its own has more requests than this beyond twice those of the least loaded one."""
MAX_LOSSES = 5
"""A reply fails after this many engine calls in a row without a token."""


class _RemoteGenerate(Protocol):
    def remote(self, request: GenerateRequest, /) -> Awaitable[Completion]: ...


class _RemoteGoOn(Protocol):
    def remote(self, reply: str, /) -> Awaitable[Completion]: ...


class EngineHandle(Protocol):
    """A Ray actor handle of an engine, or anything shaped like it."""

    @property
    def generate(self) -> _RemoteGenerate: ...

    @property
    def go_on(self) -> _RemoteGoOn: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class RemoteCalls:
    """What the client must know about remote calls: Ray's in a run, anything else in a test."""

    cancel: Callable[[Awaitable[Completion]], None]
    """Stops a call that nobody waits for any more."""
    is_lost: Callable[[Exception], bool]
    """True when this failure means that the engine is gone, so another engine may be tried."""


def rest_of(request: GenerateRequest, reply: Completion) -> GenerateRequest:
    """The request for what follows the tokens of `reply`."""
    num_sampled = len(reply.ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + reply.ids,
        num_sampled=num_sampled,
        num_routed=request.num_routed + reply.num_routes,
        max_new_tokens=request.max_new_tokens - num_sampled,
    )


class EngineClient:
    """Sends each request to the serving engine with the fewest outstanding requests.

    Requests with the same prefix key stay on one engine, whose cache holds their prompt, unless it is much more loaded.
    A lost engine gets no requests until `set_serving` names it again.
    """

    def __init__(self, engines: Sequence[EngineHandle], calls: RemoteCalls, patience_s: float) -> None:
        """All engines serve at first. A request waits up to `patience_s` seconds while no engine serves."""
        self._engines = list(engines)
        self._calls = calls
        self._patience_s = patience_s
        self.outstanding = [0] * len(engines)
        """Number of open requests of each engine."""
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._serving: set[int] = set()
        self._has_engine = asyncio.Event()
        self.set_serving(range(len(engines)))

    @property
    def is_served(self) -> bool:
        """True while any engine takes requests."""
        return bool(self._serving)

    def set_serving(self, engines: Collection[int]) -> None:
        """Send requests that name no engine to these engines only. Calls under way stay where they are."""
        self._serving = set(engines)
        assert self._serving <= set(range(len(self._engines))), f"no such engine: {engines}"
        if self._serving:
            self._has_engine.set()
        else:
            self._has_engine.clear()

    async def generate(
        self, request: GenerateRequest, sampled: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Sample one reply; `sampled` is called with each part as it arrives.

        A lost engine costs only the part under way. Raises EngineLost when the engine that the request names is lost,
        or when MAX_LOSSES calls in a row gave no token, DeadlineError when no engine serves for `patience_s`, and
        whatever an engine raises.
        """
        reply = Completion(ids=[], logprobs=[], versions=[], cache_versions=[], finish_reason="length")
        losses, home, name = 0, None, ""
        while True:
            if name:
                assert home is not None
                call = self._engines[home].go_on.remote(name)
            else:
                home = await self._route(request, home)
                call = self._engines[home].generate.remote(rest_of(request, reply) if reply.ids else request)
            part = await self._answer(home, request, call)
            name = "" if part is None else part.reply
            if part is None or (part.finish_reason == "abort" and not part.ids):
                losses += 1
                if losses == MAX_LOSSES:
                    raise EngineLost(f"{losses} engine calls in a row gave a reply no token: the engines were lost")
                continue
            losses = 0
            if sampled is not None:
                sampled(part)
            reply.add(part)
            if part.finish_reason in ("stop", "length") or len(reply.ids) >= request.max_new_tokens:
                reply.finish_reason, reply.reply = "stop" if part.finish_reason == "stop" else "length", ""
                return reply

    async def _answer(self, index: int, request: GenerateRequest, call: Awaitable[Completion]) -> Completion | None:
        """What a call to an engine gives; None when the engine was lost and another engine may be tried."""
        self.outstanding[index] += 1
        try:
            return await call
        except asyncio.CancelledError:
            self._calls.cancel(call)
            raise
        except Exception as error:
            if not self._calls.is_lost(error):
                raise
            if request.engine is not None:
                raise EngineLost(
                    f"rollout engine {index} was lost, and with it the version that this request asked for"
                ) from error
            self.set_serving(self._serving - {index})
            return None
        finally:
            self.outstanding[index] -= 1

    async def _route(self, request: GenerateRequest, last: int | None) -> int:
        """The engine that begins the reply, or goes on with it after `last` could not."""
        if request.engine is not None:
            return request.engine
        while not self._serving:
            await within(
                "waiting for a rollout engine that serves",
                self._patience_s,
                self._has_engine.wait(),
                "the engines died, or took longer than deadlines.start_s to come back",
            )
        least = min(sorted(self._serving), key=lambda index: self.outstanding[index])
        key = request.prefix_key
        home = last if last is not None else self._homes.get(key, least) if key is not None else least
        if home not in self._serving or self.outstanding[home] > 2 * self.outstanding[least] + MAX_LEAD:
            home = least
        if key is not None and last is None:
            self._homes[key] = home
            self._homes.move_to_end(key)
            if len(self._homes) > MAX_KEYS:
                self._homes.popitem(last=False)
        return home
