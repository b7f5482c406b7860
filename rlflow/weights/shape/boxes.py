"""Boxes of indices, [start, stop) in each dimension: what parts of tensors are made of. Pure."""

import math
import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise

Index = tuple[int, ...]
Box = tuple[Index, Index]


def extents(start: Index, stop: Index) -> Index:
    """The shape of the box [start, stop)."""
    return tuple(last - first for first, last in zip(start, stop, strict=True))


def num_elements(start: Index, stop: Index) -> int:
    """The number of elements in the box [start, stop)."""
    return math.prod(extents(start, stop))


def row_major(shape: Index) -> Index:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda stride, extent: stride * extent, initial=1))[::-1][: len(shape)]


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None when that is nothing."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(map(operator.lt, start, stop)) else None


def difference(box: Box, other: Box) -> list[Box]:
    """A box without what it has in common with another, as boxes."""
    inner = intersection(box, other)
    if inner is None:
        return [box]
    start, stop = list(box[0]), list(box[1])
    parts: list[Box] = []
    for dim, (first, last) in enumerate(zip(*inner, strict=True)):
        if start[dim] < first:
            parts.append((tuple(start), (*stop[:dim], first, *stop[dim + 1 :])))
        if last < stop[dim]:
            parts.append(((*start[:dim], last, *start[dim + 1 :]), tuple(stop)))
        start[dim], stop[dim] = first, last
    return parts


def split(start: Index, stop: Index, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` elements."""
    if num_elements(start, stop) <= limit:
        yield start, stop
        return
    dim = next(dim for dim, (first, last) in enumerate(zip(start, stop, strict=True)) if last - first > 1)
    extent = stop[dim] - start[dim]
    count = -(-extent // max(1, limit // (num_elements(start, stop) // extent)))
    bounds = [start[dim] + extent * index // count for index in range(count + 1)]
    for first, last in pairwise(bounds):
        yield from split((*start[:dim], first, *start[dim + 1 :]), (*stop[:dim], last, *stop[dim + 1 :]), limit)


def run_boxes(shape: Index, first: int, last: int) -> list[tuple[Index, Index, int]]:
    """The boxes that the elements [first, last) in row-major order are made of, each with its first element."""
    if first >= last:
        return []
    if len(shape) <= 1:
        return [((first,) * len(shape), (last,) * len(shape), first)]
    row = math.prod(shape[1:])
    full_from, full_to = -(-first // row), last // row
    if full_from > full_to:  # within one row
        return _boxes_in_row(shape, full_to, first, last)
    boxes = _boxes_in_row(shape, full_from - 1, first, full_from * row)
    if full_from < full_to:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((full_from, *zeros), (full_to, *shape[1:]), full_from * row))
    return boxes + _boxes_in_row(shape, full_to, full_to * row, last)


def _boxes_in_row(shape: Index, at: int, first: int, last: int) -> list[tuple[Index, Index, int]]:
    base = at * math.prod(shape[1:])
    return [
        ((at, *start), (at + 1, *stop), base + offset)
        for start, stop, offset in run_boxes(shape[1:], first - base, last - base)
    ]
