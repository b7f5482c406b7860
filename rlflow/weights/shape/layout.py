"""Where each element of each parameter lies: on the ranks of a trainer, and on those of an engine.

A layout is a few boxes for each rank and parameter, whatever the size of the model. Rows, columns, both at once, whole
copies, parts of a fused or padded tensor, one expert of a stack: each is one box. A run of elements is at most
2 * dimensions - 1 of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import Index, extents, num_elements, row_major, run_boxes

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, str]
"""torch's names without the prefix, by the same names as shapes."""
Mesh = tuple[tuple[int, int | None], ...]
"""The size of each dimension of a mesh, and the dimension of a parameter that it cuts; None if it cuts none."""

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8}


@dataclass(kw_only=True, slots=True, frozen=True)
class Region:
    """The box [start, stop) of a parameter, and where one rank keeps it.

    Element (i, j) of the parameter is element `offset + (i - start[0]) * strides[0] + (j - start[1]) * strides[1]` of
    the rank's tensor, laid flat.

    Example: rows 4 and 5 of a parameter [8, 3], as rows 10 and 11 of a fused tensor:
        Region(start=(4, 0), stop=(6, 3), offset=30, strides=(3, 1))
    """

    start: Index
    stop: Index
    offset: int
    strides: Index
    tensor: int = 0
    """Which of `ParameterPlacement.tensors`."""

    @property
    def shape(self) -> Index:
        return extents(self.start, self.stop)

    @property
    def num_elements(self) -> int:
        return num_elements(self.start, self.stop)

    def offset_of(self, index: Index) -> int:
        """Where the element `index` of the parameter lies."""
        return self.offset + sum(
            (at - first) * stride for at, first, stride in zip(index, self.start, self.strides, strict=True)
        )

    def view_of(self, held: Tensor) -> Tensor:
        """The elements of the rank's contiguous tensor that are in the box, in the box's shape."""
        return held.as_strided(self.shape, self.strides, self.offset + int(held.storage_offset()))

    def box_of(self, whole: Tensor) -> Tensor:
        """The box of the whole parameter."""
        return whole[tuple(map(slice, self.start, self.stop))]


Ranks = tuple[tuple[Region, ...], ...]
"""What each rank holds of one parameter."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterPlacement:
    """Where one parameter lies."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix."""
    tensors: tuple[str, ...]
    """Names of the ranks' own tensors that hold parts of it; several if the parameter is kept twice."""
    ranks: Ranks
    """A rank without any of it has an empty tuple. Parameters that lie alike have equal `ranks`."""

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    """Where all parameters lie, by their Hugging Face names."""

    num_ranks: int
    placements: Mapping[str, ParameterPlacement]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self.placements.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: place.dtype for name, place in self.placements.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of one copy of all parameters."""
        return sum(math.prod(each.shape) * each.element_bytes for each in self.placements.values())


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLayout:
    """One engine that takes part in a transfer."""

    layout: Layout
    devices: tuple[int, ...] | None = None
    """The rank of the trainer on the device of each rank of the engine; None if they share none."""
    senders: frozenset[int] | None = None
    """The ranks of the trainer that may send to it; None: all."""


def whole_region(shape: Index) -> Region:
    """All of a parameter, as a contiguous tensor keeps it."""
    return Region(start=(0,) * len(shape), stop=shape, offset=0, strides=row_major(shape))


def chunk_of(size: int, index: int, count: int) -> tuple[int, int]:
    """Part `index` of `count`: equal chunks, rounded up, the last ones shorter or empty, as torch and ZeRO cut."""
    chunk = -(-size // count)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def mesh_layout(shapes: Shapes, dtype: str, num_ranks: int, mesh: Callable[[str], Mesh]) -> Layout:
    """A trainer whose ranks form a mesh for each parameter, numbered with its last dimension fastest.

    If two dimensions of the mesh cut the same one of the parameter, the last cuts first, as FSDP2 above tensor
    parallelism does. Raises ConfigError when a mesh has not `num_ranks` ranks, or cuts what is not there.

    Examples, for 8 ranks: rows shared out ((8, 0),); copies, as ZeRO 1 and 2 have them ((8, None),); rows shared out in
    two copies ((2, None), (4, 0)).
    """
    placements = {
        name: ParameterPlacement(
            shape=shape, dtype=dtype, tensors=(name,), ranks=_mesh_ranks(shape, mesh(name), num_ranks)
        )
        for name, shape in shapes.items()
    }
    return Layout(num_ranks=num_ranks, placements=placements)


def fsdp_layout(
    shapes: Shapes,
    dtype: str,
    num_ranks: int,
    tensor_parallel: int = 1,
    cut: Mapping[str, int] | None = None,
    replicas: int = 1,
) -> Layout:
    """The FSDP2 trainer, with tensor parallelism or without: the rows of each parameter are shared out.

    `cut` names the parameters that tensor parallelism cuts, and along which dimension: `tensor_parallel` neighbours in
    rank have a slice each, of which the rows are shared out over the others. All ranks share the rest. Each of
    `replicas`, as many neighbours in rank, has all of it.
    """
    sliced, num_shards = cut or {}, num_ranks // replicas
    copies: Mesh = ((replicas, None),) if replicas > 1 else ()

    def mesh(name: str) -> Mesh:
        if name not in sliced:
            return (*copies, (num_shards, 0))
        return (*copies, (num_shards // tensor_parallel, 0), (tensor_parallel, sliced[name]))

    return mesh_layout(shapes, dtype, num_ranks, mesh)


def runs_layout(shapes: Shapes, dtype: str, runs: Sequence[Mapping[str, tuple[int, int]]]) -> Layout:
    """A trainer whose ranks hold a run [first, last) of the elements of each parameter; `runs` are given by rank."""
    placements = {
        name: ParameterPlacement(
            shape=shape, dtype=dtype, tensors=(name,), ranks=_run_ranks(shape, tuple(each[name] for each in runs))
        )
        for name, shape in shapes.items()
    }
    return Layout(num_ranks=len(runs), placements=placements)


@lru_cache(maxsize=1024)
def _mesh_ranks(shape: Index, mesh: Mesh, num_ranks: int) -> Ranks:
    sizes = [size for size, _ in mesh]
    if math.prod(sizes) != num_ranks or any(dim is not None and not 0 <= dim < len(shape) for _, dim in mesh):
        raise ConfigError(f"a mesh of {num_ranks} ranks must cut dimensions of the shape {shape}; got {mesh}")
    ranks: list[tuple[Region, ...]] = []
    for coordinates in product(*(range(size) for size in sizes)):
        start, stop = [0] * len(shape), list(shape)
        for (size, dim), coordinate in reversed(list(zip(mesh, coordinates, strict=True))):
            if dim is not None:
                first, last = chunk_of(stop[dim] - start[dim], coordinate, size)
                start[dim], stop[dim] = start[dim] + first, start[dim] + last
        local = extents(tuple(start), tuple(stop))
        region = Region(start=tuple(start), stop=tuple(stop), offset=0, strides=row_major(local))
        ranks.append(() if 0 in local else (region,))
    return tuple(ranks)


@lru_cache(maxsize=1024)
def _run_ranks(shape: Index, runs: tuple[tuple[int, int], ...]) -> Ranks:
    return tuple(
        tuple(
            Region(start=start, stop=stop, offset=offset - first, strides=row_major(shape))
            for start, stop, offset in run_boxes(shape, first, last)
        )
        for first, last in runs
    )
