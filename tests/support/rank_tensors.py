"""What the ranks of a layout hold, as tensors, and what a worker of such an engine learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from layouts import load, whole
from torch import Tensor

from rlflow.config import Transport
from rlflow.roles import StagedWeights
from rlflow.weights.engine.messages import Columns, Opening, WeightReport
from rlflow.weights.shape.landings import Landing, Landings
from rlflow.weights.shape.layout import Layout, Shapes


def tensors_of(layout: Layout, dtype: torch.dtype, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Each rank's tensors, flat; no two elements of the parameters are equal."""
    ranks = load(layout, {name: scale * value for name, value in whole(layout).items()})
    return [{name: torch.from_numpy(array).to(dtype) for name, array in tensors.items()} for tensors in ranks]


def landings_of(layout: Layout, rank: int) -> Landings:
    return {
        name: [Landing(tensor=place.tensors[0], dtype=place.dtype, regions=place.ranks[rank])]
        for name, place in layout.placements.items()
    }


@dataclass
class Targets:
    """A `Destination` of plain tensors, which notes what has landed."""

    shapes: Shapes
    targets: Mapping[str, Tensor]
    landings: Landings
    names: list[str] = field(default_factory=list)
    """What has landed."""
    is_beside: bool = True

    @property
    def missing(self) -> list[str]:
        return sorted(set(self.shapes) - set(self.names))

    def begin(self) -> None:
        self.names.clear()

    def land(self, name: str, whole: Tensor) -> None:
        raise NotImplementedError("the transports under test send parts")

    def landed(self, name: str) -> None:
        self.names.append(name)

    def commit(self) -> None:
        raise NotImplementedError("nothing computes with these tensors")

    def compare(self, expected: Iterable[tuple[str, Tensor]] | None, columns: Columns | None) -> WeightReport:
        raise NotImplementedError("nothing computes with these tensors")


def opening(version: int, transfer: int = 0) -> Opening:
    """What a receiver is told that knows already where to ask."""
    staged = StagedWeights(version=version, path="", num_bytes=0, slots=(), buckets=())
    return Opening(staged=staged, transport=Transport.p2p, engine=0, transfer=transfer, timeout_s=60.0)
