"""What the ranks of a layout hold, as tensors, and what a worker of such an engine learns."""

from __future__ import annotations

import torch
from layouts import load, whole
from torch import Tensor

from rlflow.weights.learn.tracing import Landing, Landings
from rlflow.weights.shape.layout import Layout


def tensors_of(layout: Layout, dtype: torch.dtype, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Each rank's tensors, flat; no two elements of the parameters are equal."""
    ranks = load(layout, {name: scale * value for name, value in whole(layout).items()})
    return [{name: torch.from_numpy(array).to(dtype) for name, array in tensors.items()} for tensors in ranks]


def landings_of(layout: Layout, rank: int) -> Landings:
    return {
        name: [Landing(tensor=place.tensors[0], dtype=place.dtype, regions=place.ranks[rank])]
        for name, place in layout.placements.items()
    }
