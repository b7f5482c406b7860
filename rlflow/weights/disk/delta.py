"""What changed between two versions of the weights, and how it gets into an engine's tensors. Pure.

values before, values now -> changed -> positions and new values -> land -> the engine's tensors

A change is the position of an element and its new value. Nothing is added to anything: no rounding adds up, and to
apply it twice is to apply it once. Few elements of 16 bits change in one update, because most updates are smaller than
their last bit (arXiv:2602.03839); of float32 nearly all do, and a delta is then larger than the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from rlflow.weights.shape.boxes import Index, extents, intersection, row_major
from rlflow.weights.shape.layout import Region

DELTA_SHARE = 0.3
"""A delta of more than this share of the weights' bytes is not worth it: with positions of 4 bytes and values of 2,
that is more than one changed element in 10. In bytes it breaks even at one in 3; in time earlier, because a CPU finds
the place of one changed element while it reads, checks and copies several of the weights."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True, slots=True, frozen=True)
class Changes:
    """What changed, on one rank of the trainer or, added up, on all. All are counts, so that they can be reduced."""

    num_changed: int
    num_elements: int
    delta_bytes: int
    dense_bytes: int
    num_without_base: int
    """Ranks that cannot say what changed, because they have nothing to compare with or gave up."""

    @property
    def density(self) -> float:
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def is_delta(self) -> bool:
        """Whether to send what changed, and not everything."""
        return self.num_without_base == 0 and self.delta_bytes <= DELTA_SHARE * self.dense_bytes

    def counts(self) -> tuple[int, ...]:
        """In the order of the fields; when they are added up over the ranks, `Changes.of` takes them back."""
        return astuple(self)

    @classmethod
    def of(cls, counts: Sequence[int]) -> Changes:
        return cls(**{each.name: count for each, count in zip(fields(cls), counts, strict=True)})


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: equal where, and only where, the bits are, also of NaN and of -0.0."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def changed(before: Tensor, now: Tensor) -> Tensor:
    """Positions [n] of the elements of two flat tensors whose bits differ, ascending, int64."""
    return torch.nonzero(bits(before) != bits(now)).view(-1)


def position_dtype(num_elements: int) -> torch.dtype:
    """The dtype of positions in a tensor with this many elements."""
    return torch.int32 if num_elements < 2**31 else torch.int64


def positions_in(shape: Index, start: Index, stop: Index, positions: Tensor) -> Tensor:
    """Positions [n] in the box [start, stop), counted in row-major order, as positions in the parameter of `shape`."""
    box_shape = extents(start, stop)
    strides = row_major(shape)
    offset = sum(first * stride for first, stride in zip(start, strides, strict=True))
    box = Region(start=(0,) * len(shape), stop=box_shape, offset=offset, strides=strides)
    return _places(box, box_shape, positions)[1].to(position_dtype(math.prod(shape)))


def land(target: Tensor, region: Region, shape: Index, positions: Tensor, values: Tensor) -> int:
    """Write those elements of a parameter of `shape` that lie in `region` to a rank's contiguous `target`.

    `positions` [n], in the parameter laid flat, in any order, each once; `values` [n], of the target's dtype and on its
    device. Returns how many were written.
    """
    assert values.dtype == target.dtype, f"{values.dtype} is written bit for bit to {target.dtype}"
    inside, places = _places(region, shape, positions)
    written = bits(values) if inside is None else bits(values).index_select(0, inside)
    bits(target).view(-1).index_copy_(0, places, written)
    return len(places)


def land_box(target: Tensor, region: Region, start: Index, values: Tensor) -> int:
    """Write what lies in `region` of a box of a parameter to a rank's contiguous `target`.

    The box begins at `start` and has the shape of `values`, which may have any strides, and are cast to the target's
    dtype. Returns how many elements were written.
    """
    stop = tuple(first + extent for first, extent in zip(start, values.shape, strict=True))
    common = intersection((start, stop), (region.start, region.stop))
    if common is None:
        return 0
    part = values[tuple(slice(a - first, b - first) for a, b, first in zip(*common, start, strict=True))]
    there = target.as_strided(part.shape, region.strides, int(target.storage_offset()) + region.offset_of(common[0]))
    there.copy_(part)
    return part.numel()


def _places(region: Region, shape: Index, positions: Tensor) -> tuple[Tensor | None, Tensor]:
    """Which of the positions lie in a region, as indices [n] into them, and where those lie in the rank's tensor.

    None: all do. Both are int64.
    """
    axes = _folded(region, shape)
    coordinates: list[Tensor] = []  # of the last axis first
    left = positions
    for axis in axes[:0:-1]:
        outer = torch.div(left, axis.extent, rounding_mode="floor")
        coordinates.append(left - outer * axis.extent)
        left = outer
    coordinates.append(left)
    pairs = list(zip(reversed(axes), coordinates, strict=True))
    within = [
        (at >= axis.first) & (at < axis.last) for axis, at in pairs if (axis.first, axis.last) != (0, axis.extent)
    ]
    inside = None
    if within:
        inside = torch.nonzero(torch.stack(within).all(0) if len(within) > 1 else within[0]).view(-1)
    places = torch.zeros((), dtype=torch.int64, device=positions.device)
    for axis, at in pairs:
        chosen = at if inside is None else at.index_select(0, inside)
        places = places + (chosen.to(torch.int64) - axis.first) * axis.stride
    return inside, places + region.offset


@dataclass(kw_only=True, slots=True, frozen=True)
class _Axis:
    """Several dimensions of a parameter that lie in a rank's tensor like one."""

    extent: int
    first: int
    last: int
    stride: int


def _folded(region: Region, shape: Index) -> list[_Axis]:
    """At least one axis, and as few as possible: rows, wherever they lie, are one, columns two."""
    axes = [_Axis(extent=1, first=0, last=1, stride=0)]
    for extent, first, last, stride in zip(shape, region.start, region.stop, region.strides, strict=True):
        if extent == 1:
            continue
        outer = axes[-1]
        goes_on = outer.stride == extent * stride and (first, last) == (0, extent)
        if outer.last - outer.first == 1 or goes_on:
            axes[-1] = _Axis(
                extent=outer.extent * extent,
                first=outer.first * extent + first,
                last=(outer.last - 1) * extent + last,
                stride=stride,
            )
        else:
            axes.append(_Axis(extent=extent, first=first, last=last, stride=stride))
    return axes
