"""Versions of the weights on disk, written by a trainer and followed by a reader; part of `rlflow bench weights`.

optimiser step -> compare -> write -> publish -> fetch -> apply

The moments are filled by a few steps first. In bfloat16 few weights change in a step, in float32 nearly all: then each
version is written whole. The reader's tensors are those of the trainer, one for each parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from rlflow.config import Config, Dtype
from rlflow.errors import RunError
from rlflow.types import TrainSample
from rlflow.weights.disk.delta import bits
from rlflow.weights.disk.manifest import ParameterSpec
from rlflow.weights.disk.reader import StoreReader
from rlflow.weights.disk.writer import Part, StoreWriter
from rlflow.weights.shape.boxes import row_major
from rlflow.weights.shape.landings import Landing
from rlflow.weights.shape.layout import Region
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.packed import TrainerBackend

LEARNING_RATES = (1e-6, 1e-5)
FILLING_STEPS, STEPS = 3, 4
STAGES = ("compare", "write", "publish", "fetch", "apply")

Figures = dict[str, float | list[float]]
T = TypeVar("T")


def take_step(trainer: TrainerBackend, samples: Sequence[TrainSample]) -> None:
    """Raises RunError when the gradient was not finite, so that nothing changed."""
    trainer.accumulate([[samples]])
    if not trainer.step().applied:
        raise RunError("an optimiser step of the measurement was not applied: its gradient is not finite")


def deltas(config: Config, model_path: str, samples: Sequence[TrainSample], folder: Path) -> Figures:
    """Density of each version, bytes over those of all weights, medians of seconds, by dtype and learning rate.

    Raises RunError when what was read is not what was written.
    """
    figures: Figures = {}
    for learning_rate in LEARNING_RATES:
        own = replace(config, trainer=replace(config.trainer, learning_rate=learning_rate))
        trainer = FsdpTrainer(own, model_path, 0, 1, f"file://{folder}/{learning_rate}")
        for _ in range(FILLING_STEPS):
            take_step(trainer, samples)
        dtypes = [(Dtype.bfloat16, STEPS)] + [(Dtype.float32, 1)] * (learning_rate == LEARNING_RATES[0])
        for dtype, steps in dtypes:
            name = f"{dtype}_{learning_rate:g}"
            store = _Store(trainer, dtype, folder / name)
            figures |= {f"deltas/{name}/{key}": value for key, value in store.measure(samples, steps).items()}
        trainer.close()
    return figures


class _Store:
    """A folder of versions, with its writer and a reader."""

    def __init__(self, trainer: TrainerBackend, dtype: Dtype, folder: Path) -> None:
        self._trainer = trainer
        self._layout = trainer.layout()
        assert self._layout is not None and self._layout.num_ranks == 1, "one rank holds everything"
        places = self._layout.placements
        specs = {name: ParameterSpec(shape=place.shape, dtype=dtype) for name, place in places.items()}
        self._targets = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()
        }
        landings = {
            name: [Landing(tensor=name, dtype=spec.dtype, regions=(_whole(spec.shape),))]
            for name, spec in specs.items()
        }
        shapes = {name: spec.shape for name, spec in specs.items()}
        self._writer = StoreWriter(folder, 0, 1, specs)
        self._reader = StoreReader(folder, self._targets, landings, shapes)
        self._seconds: dict[str, list[float]] = {}

    def measure(self, samples: Sequence[TrainSample], steps: int) -> Figures:
        """Figures of the versions after the first one, which is written whole."""
        dense_bytes, _, _ = self._follow(0)
        anchor = {stage: seconds.pop() for stage, seconds in self._seconds.items()}
        found: list[tuple[int, float, bool]] = []
        for version in range(1, steps + 1):
            take_step(self._trainer, samples)
            found.append(self._follow(version))
        return {
            "density": [density for _, density, _ in found],
            "bytes_share": [num_bytes / dense_bytes for num_bytes, _, _ in found],
            "deltas": sum(is_delta for _, _, is_delta in found),
            **{f"{stage}_s": statistics.median(seconds) for stage, seconds in self._seconds.items()},
            **{f"first/{stage}_s": seconds for stage, seconds in anchor.items()},
        }

    def _follow(self, version: int) -> tuple[int, float, bool]:
        """Write a version and read it; its bytes on disk, the share that changed, and whether only that was written."""
        total = self._timed("compare", lambda: self._writer.compare(version, self._parts()))
        self._timed("write", lambda: self._writer.write(total))
        manifest = self._timed("publish", self._writer.publish)
        update = self._timed("fetch", lambda: self._reader.fetch(version))
        self._timed("apply", lambda: list(self._reader.apply(update)))
        for part in self._parts():
            target = self._targets[part.name]
            if not torch.equal(bits(target), bits(part.tensor.to(target.dtype).to("cpu").view(target.shape))):
                raise RunError(f"{part.name!r} of version {version} was not read as it was written")
        return manifest.num_bytes, total.density, manifest.base is not None

    def _parts(self) -> Iterator[Part]:
        assert self._layout is not None
        for name, held in self._trainer.held():
            (region,) = self._layout.placements[name].ranks[0]
            yield Part(name=name, start=region.start, stop=region.stop, tensor=held)

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        found = work()
        self._seconds.setdefault(stage, []).append(time.perf_counter() - started)
        return found


def _whole(shape: tuple[int, ...]) -> Region:
    return Region(start=(0,) * len(shape), stop=shape, offset=0, strides=row_major(shape))
