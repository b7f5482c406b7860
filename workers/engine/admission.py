"""How many requests an engine decodes at the same time, by the pressure on its key-value cache.

vLLM's step reports -> pressure_gauge -> RunningLimit;  requests -> Gate -> vLLM

vLLM admits a request when its prompt fits and preempts it when the replies outgrow the cache: what it had computed is
computed again. Admitting fewer is faster than preempting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerFactory
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

DECREASE = 0.75
"""Share of the running requests that is kept after a preemption."""
ROOM = 0.85
"""Share of the cache in use above which the limit does not rise."""
STEPS_PER_INCREASE = 64
"""Steps with room between two increases: a request that was let in must first show how much it takes."""


class RunningLimit:
    """Additive increase, multiplicative decrease, between 1 and `maximum`; starts at `maximum`.

    One decrease answers one shortage: until no more requests run than the limit allows, further preemptions are of
    the same shortage.
    """

    def __init__(self, maximum: int) -> None:
        assert maximum >= 1, f"an engine must run at least one request; got {maximum}"
        self.value = maximum
        self._maximum = maximum
        self._is_settling = False
        self._steps_with_room = 0
        self._forgiven = 0

    def step(self, running: int, cache_usage: float, preempted: int) -> None:
        """One step of vLLM: requests running after it, share of the cache in use, requests preempted for room."""
        self._is_settling = self._is_settling and running > self.value
        pressing = preempted - min(preempted, self._forgiven)
        self._forgiven -= preempted - pressing
        if pressing:
            self._steps_with_room = 0
            if not self._is_settling:
                self.value = max(1, min(self.value, int((running + pressing) * DECREASE)))
                self._is_settling = running > self.value
        elif cache_usage < ROOM and running >= self.value:
            self._steps_with_room += 1
            if self._steps_with_room == STEPS_PER_INCREASE:
                self._steps_with_room = 0
                self.value = min(self._maximum, self.value + 1)

    def forgive(self, number: int) -> None:
        """A weight update is about to preempt up to `number` requests: that says nothing about the cache."""
        self._forgiven = number


class Gate:
    """Lets at most `limit.value` requests through at a time, first come, first served."""

    def __init__(self, limit: RunningLimit) -> None:
        self.limit = limit
        self.inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.refill()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # else it was cancelled before it was let in
                self.inside -= 1
                self.refill()

    def forgive(self) -> None:
        """All requests inside are about to be preempted; how many of them run is known from the last step only."""
        self.limit.forgive(self.inside)

    def refill(self) -> None:
        """Let in as many as the limit has room for; to be called when it rises."""
        while self._waiting and self.inside < self.limit.value:
            turn = self._waiting.popleft()
            if not turn.done():
                self.inside += 1
                turn.set_result(None)


def pressure_gauge(gate: Gate) -> StatLoggerFactory:
    """Reports each step of vLLM to the gate: one of the `stat_loggers` of its AsyncLLM."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Gauge(StatLoggerBase):
        """Called in the event loop that samples."""

        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            """It needs nothing of these."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is None:
                return
            preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
            gate.limit.step(scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage, preempted)
            gate.refill()

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Gauge
