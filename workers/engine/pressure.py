"""Reads off vLLM how full its key-value cache is. Imports vLLM: engines only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from rlflow.workers.engine.admission import Gate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerFactory
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class _PressureGauge(StatLoggerBase):
    """Reports each step of vLLM to the gate; called in the event loop that samples."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *, gate: Gate) -> None:
        self._gate = gate

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
        self._gate.limit.step(scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage, preempted)
        self._gate.refill()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def pressure_gauge(gate: Gate) -> StatLoggerFactory:
    """For `stat_loggers` of vLLM's AsyncLLM."""

    def build(vllm_config: VllmConfig, engine_index: int, **_: Any) -> StatLoggerBase:
        return _PressureGauge(vllm_config, engine_index, gate=gate)

    return build
