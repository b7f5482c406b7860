"""A region of a parameter as a view: in the parameter, and in the tensor that keeps it."""

from __future__ import annotations

from torch import Tensor

from rlflow.weights.shape.boxes import extents
from rlflow.weights.shape.layout import Region


def view_of(held: Tensor, region: Region) -> Tensor:
    """The elements of a contiguous tensor at which a region's box lies, in the box's shape."""
    offset = region.offset + int(held.storage_offset())
    return held.as_strided(extents(region.start, region.stop), region.strides, offset)


def box_of(whole: Tensor, region: Region) -> Tensor:
    """A region's box of a parameter."""
    return whole[tuple(slice(first, last) for first, last in zip(region.start, region.stop, strict=True))]
