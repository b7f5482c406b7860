"""Where an engine's loader puts each parameter: its copies between strided views, as regions. Pure.

A loader narrows, splits, transposes and reshapes, then copies one view into another. Each such copy is a few boxes of
the parameter, and copies that continue one another are one. Trainer and engines tell each other layouts and landings
as JSON before anything is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import TypeAdapter

from rlflow.errors import NotACopy
from rlflow.weights.shape.boxes import Index, row_major
from rlflow.weights.shape.layout import Dtypes, Layout, ParameterPlacement, Ranks, Region, Shapes, whole_region


@dataclass(kw_only=True, slots=True, frozen=True)
class Landing:
    """What was copied from one parameter into one tensor of the model."""

    tensor: str
    dtype: str
    """The tensor's."""
    regions: tuple[Region, ...]
    """With offsets in the tensor, laid flat."""


Landings = Mapping[str, Sequence[Landing]]
"""What was copied from each parameter, by its name."""


def whole_landings(shapes: Shapes, dtypes: Dtypes) -> Landings:
    """Each parameter in a tensor of its own name, as it is."""
    return {
        name: (Landing(tensor=name, dtype=dtypes[name], regions=(whole_region(shape),)),)
        for name, shape in shapes.items()
    }


def layout_of(shapes: Shapes, dtypes: Dtypes, ranks: Sequence[Landings]) -> Layout:
    """Where the ranks of an engine keep parameters, from what was seen on each.

    `dtypes` are for parameters that none of them takes. Raises NotACopy for a parameter that is kept in several dtypes.
    """
    placements: dict[str, ParameterPlacement] = {}
    for name, shape in shapes.items():
        found = [landings.get(name, ()) for landings in ranks]
        kept = {landing.dtype for each in found for landing in each} or {dtypes[name]}
        if len(kept) > 1:
            raise NotACopy(f"{name!r} is kept as {' and as '.join(sorted(kept))}; it cannot be sent as one")
        tensors = tuple(dict.fromkeys(landing.tensor for each in found for landing in each))
        regions = tuple(
            tuple(
                replace(region, tensor=tensors.index(landing.tensor)) for landing in each for region in landing.regions
            )
            for each in found
        )
        placements[name] = ParameterPlacement(shape=shape, dtype=kept.pop(), tensors=tensors, ranks=regions)
    return Layout(num_ranks=len(ranks), placements=placements)


class Axis(NamedTuple):
    """One dimension of a copy: `extent` elements, this far from each other on either side."""

    extent: int
    here: int
    """Elements between two, in the tensor whose boxes are asked for."""
    there: int


def regions_of(shape: Index, here: int, axes: Sequence[Axis], there: int) -> Iterator[Region]:
    """The boxes of a contiguous tensor of `shape` that a copy touches, and where their elements lie there.

    `here` and `there` are where the copy begins. A dimension of it that is none of the tensor, such as every second
    row, is taken apart.
    """
    axes = sorted((axis for axis in axes if axis.extent != 1), key=lambda axis: -axis.here)
    if any(axis.extent == 0 for axis in axes):
        return
    found = _as_box(shape, here, axes, there)
    if found is not None:
        yield found
        return
    first, *rest = axes
    for index in range(first.extent):
        yield from regions_of(shape, here + index * first.here, rest, there + index * first.there)


def _as_box(shape: Index, here: int, axes: Sequence[Axis], there: int) -> Region | None:
    """The copy as one box; None if it is not one."""
    own = row_major(shape)
    start = tuple(here // stride % extent for stride, extent in zip(own, shape, strict=True))
    extents, strides = [1] * len(shape), [0] * len(shape)
    dim_of = {stride: dim for dim, stride in enumerate(own) if shape[dim] > 1}
    left = list(axes)
    while left:
        axis = left.pop()
        dim = dim_of.pop(axis.here, None)
        if dim is None:
            return None
        inner, (outer, rest) = axis.extent, divmod(axis.extent, shape[dim])
        if start[dim] == 0 and rest == 0 and outer > 1:  # it goes through several dimensions
            inner = shape[dim]
            left.append(Axis(extent=outer, here=axis.here * inner, there=axis.there * inner))
        if start[dim] + inner > shape[dim]:
            return None
        extents[dim], strides[dim] = inner, axis.there
    stop = tuple(first + extent for first, extent in zip(start, extents, strict=True))
    return Region(start=start, stop=stop, offset=there, strides=tuple(strides))


def merged(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The same elements in fewer regions: neighbours whose offsets go on in one stride become one."""
    num_dims = len(regions[0].start) if regions else 0
    for dim in range(num_dims):
        done: list[Region] = []
        for region in sorted(regions, key=lambda region: _without(dim, region)):
            joined = _joined(dim, done[-1], region) if done else None
            if joined is None:
                done.append(region)
            else:
                done[-1] = joined
        regions = done
    return tuple(sorted(regions, key=lambda region: (region.tensor, region.start)))


def _without(dim: int, region: Region) -> tuple[int, Index, Index, int]:
    """All that must be equal for two regions to be merged along `dim`, then the order of merging."""
    return (
        region.tensor,
        region.start[:dim] + region.start[dim + 1 :],
        region.stop[:dim] + region.stop[dim + 1 :],
        region.start[dim],
    )


def _joined(dim: int, one: Region, other: Region) -> Region | None:
    """Two regions as one; None if the second does not begin at the end of the first."""
    if _without(dim, one)[:3] != _without(dim, other)[:3] or one.stop[dim] != other.start[dim]:
        return None
    extent, distance = one.stop[dim] - one.start[dim], other.offset - one.offset
    known = {each.strides[dim] for each in (one, other) if each.stop[dim] - each.start[dim] > 1}
    stride = known.pop() if known else distance // extent
    strides = tuple(stride if at == dim else each for at, each in enumerate(one.strides))
    others = tuple(stride if at == dim else each for at, each in enumerate(other.strides))
    if known or strides != others or distance != stride * extent:
        return None
    stop = (*one.stop[:dim], other.stop[dim], *one.stop[dim + 1 :])
    return replace(one, stop=stop, strides=strides)


@dataclass(kw_only=True, slots=True, frozen=True)
class _LayoutMessage:
    """What lies alike is written once, so that a large model takes little more than the names of its parameters."""

    num_ranks: int
    kinds: list[Ranks]
    placements: dict[str, tuple[tuple[int, ...], str, tuple[str, ...], int]]
    """Shape, dtype, tensors and index into `kinds` of each parameter."""


_LAYOUT, _LANDINGS = TypeAdapter(_LayoutMessage), TypeAdapter(dict[str, tuple[Landing, ...]])


def layout_to_json(layout: Layout) -> str:
    kinds: dict[Ranks, int] = {}
    placements = {
        name: (place.shape, place.dtype, place.tensors, kinds.setdefault(place.ranks, len(kinds)))
        for name, place in layout.placements.items()
    }
    message = _LayoutMessage(num_ranks=layout.num_ranks, kinds=list(kinds), placements=placements)
    return _LAYOUT.dump_json(message).decode()


def layout_from_json(text: str | bytes) -> Layout:
    found = _LAYOUT.validate_json(text)
    placements = {
        name: ParameterPlacement(shape=shape, dtype=dtype, tensors=tensors, ranks=found.kinds[kind])
        for name, (shape, dtype, tensors, kind) in found.placements.items()
    }
    return Layout(num_ranks=found.num_ranks, placements=placements)


def landings_to_json(landings: Landings) -> str:
    return _LANDINGS.dump_json({name: tuple(found) for name, found in landings.items()}).decode()


def landings_from_json(text: str | bytes) -> Landings:
    return _LANDINGS.validate_json(text)
