"""How busy an engine is, and whether it has more requests than it can run, as vLLM reports it after each step.

vLLM admits a request when its prompt fits into the cache, and takes one back when the replies outgrow it: that one
waits, first in the queue, and what it had computed is computed again. Admitting fewer of them from outside is no faster
(benchmarks/scheduler_model.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerFactory
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


@dataclass(slots=True)
class Pressure:
    num_steps: int = 0
    """Steps since the start."""
    num_full_steps: int = 0
    """Those in which requests had to wait: new ones, or some that were taken back."""
    num_taken_back: int = 0
    """Since the start; by updates of the weights too, which take back all."""

    @property
    def counts(self) -> tuple[int, int]:
        """Steps and full steps, for `was_full_since`."""
        return self.num_steps, self.num_full_steps

    def was_full_since(self, num_steps: int, num_full_steps: int) -> bool:
        """True if requests waited in most steps since these counts."""
        return 2 * (self.num_full_steps - num_full_steps) > self.num_steps - num_steps


class Load:
    """How busy an engine is."""

    def __init__(self) -> None:
        self.running = 0
        self.tokens = 0
        self._busy_before_s = 0.0
        self._busy_since = 0.0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        if self.running == 0:
            self._busy_since = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._busy_before_s += time.perf_counter() - self._busy_since

    def busy_s(self) -> float:
        return self._busy_before_s + (time.perf_counter() - self._busy_since if self.running else 0.0)


def pressure_gauge(pressure: Pressure) -> StatLoggerFactory:
    """Notes what vLLM reports of each step: one of the `stat_loggers` of its AsyncLLM."""
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
            if scheduler_stats is not None:
                pressure.num_steps += 1
                pressure.num_full_steps += scheduler_stats.num_waiting_reqs > 0
            if iteration_stats is not None:
                pressure.num_taken_back += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Gauge
