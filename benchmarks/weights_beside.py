"""What `rlflow bench weights` measures beside versions through shared memory.

    reload   versions saved as safetensors, each loaded during a pause, as from a checkpoint
    deltas   versions on disk, of which only what changed is written: see `weights_on_disk`

Dense and reload do not take turns: each would disturb the memory that the other keeps.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights_on_disk import deltas

from rlflow.config import Config
from rlflow.tools.bench import weights as ours
from rlflow.tools.bench.weights import Figures, Session, take_step
from rlflow.tools.bench.weights_engine import MeasuredEngine
from rlflow.types import TrainSample


@dataclass(kw_only=True, slots=True, frozen=True)
class ReloadRound:
    """Seconds of one version through a file."""

    save_s: float
    pause_s: float


def weights(overrides: Sequence[str], *, verify: bool) -> Figures:
    """All figures; raises as `rlflow.tools.bench.weights.weights` does."""
    return ours.weights(overrides, verify=verify, session=BesideReload)


class ReloadingEngine(MeasuredEngine):
    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "worker_extension_cls": "weights_reload_worker.ReloadingWorker"}

    async def reload(self, file: Path) -> float:
        """Load the weights from a file, and return the seconds in which nothing was sampled."""
        async with self._loading:
            paused_at_s = await self._pause()
            await self._engine.collective_rpc("bench_reload", args=(str(file),))
            await self._engine.resume_generation()
            return time.perf_counter() - paused_at_s


class BesideReload(Session):
    engine: ReloadingEngine

    @staticmethod
    def make_engine(config: Config, model_path: str, threads: int) -> ReloadingEngine:
        return ReloadingEngine(config, model_path, index=0, threads=threads)

    async def beside(self, dense: Figures) -> Figures:
        reloads: list[ReloadRound] = []
        for _ in range(ours.ROUNDS):
            await asyncio.to_thread(take_step, self.trainer, self.samples)
            print("save and reload", file=sys.stderr, flush=True)
            file = self.folder / "model.safetensors"
            started = time.perf_counter()
            await asyncio.to_thread(self._save, file)
            save_s = time.perf_counter() - started
            await self.check_running()
            reloads.append(ReloadRound(save_s=save_s, pause_s=await self.engine.reload(file)))
        return compare(dense, reloads[1:])

    @staticmethod
    def afterwards(config: Config, model_path: str, samples: Sequence[TrainSample], folder: Path) -> Figures:
        print("deltas", file=sys.stderr, flush=True)
        return deltas(config, model_path, samples, folder)

    def _save(self, file: Path) -> None:
        from safetensors.torch import save_file

        dtypes = {name: dtype for name, dtype, _ in self.trainer.parameter_specs()}
        whole = {name: each.to(dtypes[name]).contiguous() for name, each in self.trainer.full_parameters()}
        save_file(whole, file)


def compare(dense: Figures, reloads: Sequence[ReloadRound]) -> Figures:
    """Medians over the rounds; the ratios are of medians, and of reload to dense."""
    save_s = statistics.median([each.save_s for each in reloads])
    pause_s = statistics.median([each.pause_s for each in reloads])
    dense_pause_s, dense_total_s = dense["pause/median_s"], dense["dense/total_s"]
    assert isinstance(dense_pause_s, float) and isinstance(dense_total_s, float)
    return {
        "reload/save_s": save_s,
        "reload/pause_s": pause_s,
        "reload/total_s": save_s + pause_s,
        "reload/pause_ratio": pause_s / dense_pause_s,
        "reload/total_ratio": (save_s + pause_s) / dense_total_s,
    }
