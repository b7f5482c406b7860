"""Routing requests over the rollout engines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rlflow.rollout.requests import Completion, GenerateRequest

MAX_KEYS = 4096
"""Prefix keys remembered; the least recently used is forgotten first."""
MAX_LEAD = 8
"""Outstanding requests that a key's engine may have beyond twice those of the least loaded, before the key moves."""


class _RemoteGenerate(Protocol):
    def remote(self, request: GenerateRequest, /) -> Awaitable[Completion]: ...


class EngineHandle(Protocol):
    """A Ray actor handle of an engine, or anything shaped like it."""

    @property
    def generate(self) -> _RemoteGenerate: ...


class EngineClient:
    """Sends each request to the engine with the fewest outstanding ones.

    Requests with the same prefix key stay on one engine, whose cache holds their prompt, unless it is much more loaded.
    `cancel` is given the remote call when the task that awaits it is cancelled (`ray.cancel` in a real run).
    """

    def __init__(
        self, engines: Sequence[EngineHandle], cancel: Callable[[Awaitable[Completion]], None] | None = None
    ) -> None:
        if not engines:
            raise ValueError("engines must not be empty")
        self._engines = list(engines)
        self._cancel = cancel
        self._outstanding = [0] * len(engines)
        self._homes: OrderedDict[str, int] = OrderedDict()

    @property
    def outstanding(self) -> list[int]:
        """Requests under way, by engine."""
        return list(self._outstanding)

    async def generate(self, request: GenerateRequest) -> Completion:
        index = self._route(request.prefix_key)
        self._outstanding[index] += 1
        try:
            call = self._engines[index].generate.remote(request)
            try:
                return await call
            except asyncio.CancelledError:
                if self._cancel is not None:
                    self._cancel(call)
                raise
        finally:
            self._outstanding[index] -= 1

    def _route(self, key: str | None) -> int:
        least = min(range(len(self._engines)), key=lambda index: self._outstanding[index])
        if key is None:
            return least
        home = self._homes.get(key, least)
        if self._outstanding[home] > 2 * self._outstanding[least] + MAX_LEAD:
            home = least
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_KEYS:
            self._homes.popitem(last=False)
        return home
