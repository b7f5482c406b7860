"""Cutting parameters into the boxes that move as one: each lies in one place here and in one place there. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import Box, Index, difference, intersection, num_elements, split
from rlflow.weights.shape.layout import EngineLayout, Layout, ParameterPlacement, Ranks, Region

IntArray = NDArray[np.int64]

Holders = tuple[tuple[int, Region], ...]
"""Ranks of the trainer that hold a box, in ascending order, each with the region that the box is part of."""
_Cell = tuple[Box, Holders]


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorPiece:
    """A box that moves as one, and the ranks that hold all of it."""

    rank: int
    """Rank of the engine."""
    start: Index
    stop: Index
    target: Region
    holders: Holders


@dataclass(kw_only=True, slots=True, frozen=True)
class Cut:
    """The pieces of one parameter for one engine; shared by all that lie alike."""

    pieces: tuple[TensorPiece, ...]
    num_bytes: IntArray  # [pieces]
    ranks: IntArray  # [pieces]
    sole: IntArray  # [pieces], the rank of the trainer if only one holds the piece, else -1
    open: tuple[int, ...]
    """The pieces that several hold."""


Cuts = dict[str, list[Cut]]
"""One for each engine, by parameter."""


def cut_all(source: Layout, engines: Sequence[EngineLayout], move_bytes: int) -> Cuts:
    """Parameters that lie alike are cut once."""
    cells: dict[tuple[Ranks, frozenset[int] | None], list[_Cell]] = {}
    cuts: dict[tuple[Ranks, Ranks, int, frozenset[int] | None], Cut] = {}

    def cut(name: str, held: Ranks, engine: EngineLayout) -> Cut:
        wanted, senders = engine.layout.placements[name], engine.senders
        if (held, senders) not in cells:
            cells[held, senders] = _cells(held, senders)
        key = (held, wanted.ranks, wanted.element_bytes, senders)
        if key not in cuts:
            cuts[key] = _cut(name, cells[held, senders], wanted, move_bytes)
        return cuts[key]

    return {name: [cut(name, held.ranks, engine) for engine in engines] for name, held in source.placements.items()}


def _cut(name: str, cells: list[_Cell], wanted: ParameterPlacement, move_bytes: int) -> Cut:
    limit = max(1, move_bytes // wanted.element_bytes)
    pieces = tuple(
        TensorPiece(rank=rank, start=start, stop=stop, target=target, holders=holders)
        for rank, targets in enumerate(wanted.ranks)
        for target in targets
        for box, holders in _within(name, target, cells)
        for start, stop in split(*box, limit)
    )
    sole = [piece.holders[0][0] if len(piece.holders) == 1 else -1 for piece in pieces]
    sizes = [num_elements(piece.start, piece.stop) * wanted.element_bytes for piece in pieces]
    return Cut(
        pieces=pieces,
        num_bytes=np.array(sizes, dtype=np.int64),
        ranks=np.array([piece.rank for piece in pieces], dtype=np.int64),
        sole=np.array(sole, dtype=np.int64),
        open=tuple(index for index, rank in enumerate(sole) if rank < 0),
    )


def _cells(held: Ranks, senders: frozenset[int] | None) -> list[_Cell]:
    """Disjoint boxes, each with all ranks that hold it; no rank holds a part of one."""
    same: dict[Box, list[tuple[int, Region]]] = {}
    for rank, regions in enumerate(held):
        if senders is None or rank in senders:
            for region in regions:
                same.setdefault((region.start, region.stop), []).append((rank, region))
    cells: list[_Cell] = []
    for box, holders in same.items():
        rest, refined = [box], list[_Cell]()
        for cell, able in cells:
            common = intersection(cell, box)
            if common is None:
                refined.append((cell, able))
            else:
                both = tuple(sorted((*able, *holders), key=lambda holder: holder[0]))
                refined += [(common, both), *((part, able) for part in difference(cell, common))]
                rest = [left for part in rest for left in difference(part, common)]
        cells = refined + [(part, tuple(holders)) for part in rest]
    return sorted(cells, key=lambda cell: cell[0])


def _within(name: str, target: Region, cells: list[_Cell]) -> list[_Cell]:
    """The cells, as far as they lie in a region. Raises ConfigError when they do not fill it."""
    found = [
        (common, holders)
        for cell, holders in cells
        if (common := intersection((target.start, target.stop), cell)) is not None
    ]
    held = sum(num_elements(*box) for box, _ in found)
    if held < target.num_elements:
        raise ConfigError(
            f"{target.num_elements - held} elements of parameter {name!r} between {target.start} and {target.stop} are "
            "held by no rank of the trainer that may send them; its layout must cover the whole parameter"
        )
    return found
