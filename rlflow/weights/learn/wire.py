"""Layouts and landings as JSON: what trainer and engines tell each other before anything is sent. Pure."""

from __future__ import annotations

import json
from typing import Any

from rlflow.weights.learn.tracing import Landing, Landings
from rlflow.weights.shape.layout import Layout, Placement, Ranks, Region


def layout_to_json(layout: Layout) -> str:
    """What lies alike is written once, so that a large model takes little more than the names of its parameters."""
    kinds: dict[Ranks, int] = {}
    placements = {
        name: [place.shape, place.dtype, place.tensors, kinds.setdefault(place.ranks, len(kinds))]
        for name, place in layout.placements.items()
    }
    ranks = [[[_row_of(region) for region in regions] for regions in kind] for kind in kinds]
    return json.dumps({"num_ranks": layout.num_ranks, "ranks": ranks, "placements": placements})


def layout_from_json(text: str | bytes) -> Layout:
    """Undo `layout_to_json`."""
    found = json.loads(text)
    kinds = [tuple(tuple(map(_region_of, regions)) for regions in kind) for kind in found["ranks"]]
    placements = {
        name: Placement(shape=tuple(shape), dtype=dtype, tensors=tuple(tensors), ranks=kinds[kind])
        for name, (shape, dtype, tensors, kind) in found["placements"].items()
    }
    return Layout(num_ranks=found["num_ranks"], placements=placements)


def landings_to_json(landings: Landings) -> str:
    rows = {
        name: [[each.tensor, each.dtype, [_row_of(region) for region in each.regions]] for each in found]
        for name, found in landings.items()
    }
    return json.dumps(rows)


def landings_from_json(text: str | bytes) -> Landings:
    """Undo `landings_to_json`."""
    return {
        name: [
            Landing(tensor=tensor, dtype=dtype, regions=tuple(map(_region_of, regions)))
            for tensor, dtype, regions in rows
        ]
        for name, rows in json.loads(text).items()
    }


def _row_of(region: Region) -> list[Any]:
    return [region.start, region.stop, region.offset, region.strides, region.tensor]


def _region_of(row: list[Any]) -> Region:
    start, stop, offset, strides, tensor = row
    return Region(start=tuple(start), stop=tuple(stop), offset=offset, strides=tuple(strides), tensor=tensor)
