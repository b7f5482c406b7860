"""The ranks of a trainer that write versions of the weights, played in turn, and an engine that follows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from layouts import Model, empty, engine_layout_by_hand, load
from torch import Tensor

from rlflow.weights.disk.delta import Changes
from rlflow.weights.disk.manifest import Manifest, ParameterSpec
from rlflow.weights.disk.reader import StoreReader
from rlflow.weights.disk.writer import Part, StoreWriter
from rlflow.weights.shape.landings import Landing
from rlflow.weights.shape.layout import Layout

TINY = Model(layers=1, hidden=8, intermediate=12, heads=4, key_value_heads=2, head_dim=2, vocabulary=40)
Weights = dict[str, Tensor]


def parts_of(layout: Layout, rank: int, weights: Weights) -> list[Part]:
    """What a rank holds and no rank before it, in turn as a view and flat."""
    parts: list[Part] = []
    for name, place in layout.placements.items():
        before = {(each.start, each.stop) for held in place.ranks[:rank] for each in held}
        for region in place.ranks[rank]:
            if (region.start, region.stop) not in before:
                box = weights[name][tuple(map(slice, region.start, region.stop))]
                tensor = box if len(parts) % 2 else box.reshape(-1)
                parts.append(Part(name=name, start=region.start, stop=region.stop, tensor=tensor))
    return parts


class Trainer:
    """All ranks of a trainer, one after the other."""

    def __init__(self, folder: Path, layout: Layout, dtype: str = "bfloat16") -> None:
        self.layout = layout
        specs = {name: ParameterSpec(shape=place.shape, dtype=dtype) for name, place in layout.placements.items()}
        self.writers = [StoreWriter(folder, rank, layout.num_ranks, specs) for rank in range(layout.num_ranks)]

    def compare(self, version: int, weights: Weights) -> Changes:
        counted = [
            writer.compare(version, parts_of(self.layout, rank, weights)) for rank, writer in enumerate(self.writers)
        ]
        return Changes.of([sum(counts) for counts in zip(*(each.counts() for each in counted), strict=True)])

    def write(self, version: int, weights: Weights) -> Manifest:
        total = self.compare(version, weights)
        for writer in self.writers:
            writer.write(total)
        return self.writers[0].publish()


class Engine:
    """All ranks of an engine; their tensors are as NumPy's loader would fill them, or not."""

    def __init__(self, folder: Path, model: Model, tensor_parallel: int, dtype: str = "bfloat16") -> None:
        self.layout = engine_layout_by_hand(model, tensor_parallel, dtype)
        self.targets = [self._empty(rank, getattr(torch, dtype)) for rank in range(tensor_parallel)]
        self.readers = [
            StoreReader(folder, targets, self._landings(rank, dtype), model.shapes())
            for rank, targets in enumerate(self.targets)
        ]

    def _empty(self, rank: int, dtype: torch.dtype) -> Weights:
        return {name: torch.zeros(len(array), dtype=dtype) for name, array in empty(self.layout, rank).items()}

    def _landings(self, rank: int, dtype: str) -> dict[str, list[Landing]]:
        return {
            name: [Landing(tensor=place.tensors[0], dtype=dtype, regions=place.ranks[rank])]
            for name, place in self.layout.placements.items()
            if place.ranks[rank]
        }

    def follow(self, version: int) -> list[list[int]]:
        """For each rank the versions that it applied."""
        applied: list[list[int]] = []
        for reader in self.readers:
            update = reader.fetch(version)
            list(reader.apply(update))
            applied.append([manifest.stamp.version for manifest, _ in update.versions])
        return applied

    def check(self, weights: Weights) -> None:
        """That all ranks hold exactly these weights, by the bits."""
        patterns = {name: integers(tensor).numpy().astype(np.float64) for name, tensor in weights.items()}
        for found, expected in zip(self.targets, load(self.layout, patterns), strict=True):
            for name, array in expected.items():
                np.testing.assert_array_equal(integers(found[name]).numpy(), array, err_msg=name)


def integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Any bits, NaN included."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def with_changes(weights: Weights, seed: int, probability: float = 0.02) -> Weights:
    random = torch.Generator().manual_seed(seed)
    other = random_weights({name: tuple(tensor.shape) for name, tensor in weights.items()}, seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=random) < probability, other[name], tensor)
        for name, tensor in weights.items()
    }
