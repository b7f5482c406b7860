"""Layouts of trainers, against torch's own arithmetic and against counting."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import bytes_held, run_layout
from torch.distributed.tensor import Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import run_boxes
from rlflow.weights.shape.layout import EngineLayout, Layout, Mesh, Region, fsdp_layout, mesh_layout
from rlflow.weights.shape.plan import plan


def rows(layout: Layout, name: str) -> list[tuple[int, int] | None]:
    """The rows of each rank."""
    return [(held[0].start[0], held[0].stop[0]) if held else None for held in layout.placements[name].ranks]


def test_slices_over_neighbours_and_the_rest_over_all() -> None:
    shapes = {"q": (8, 3), "o": (3, 8), "norm": (6,)}
    layout = fsdp_layout(shapes, "float32", num_ranks=4, tensor_parallel=2, cut={"q": 0, "o": 1})
    assert rows(layout, "q") == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert rows(layout, "o") == [(0, 2), (0, 2), (2, 3), (2, 3)]
    assert layout.placements["o"].ranks[3] == (Region(start=(2, 4), stop=(3, 8), offset=0, strides=(4, 1)),)
    assert rows(layout, "norm") == [(0, 2), (2, 4), (4, 6), None]
    assert layout.num_bytes == 4 * (24 + 24 + 6)
    assert [bytes_held(layout, rank) for rank in range(4)] == [4 * 16, 4 * 16, 4 * 12, 4 * 10]


def test_replicas_have_all_of_it_and_slices_stay_within_one() -> None:
    shapes = {"q": (8, 3), "norm": (6,)}
    layout = fsdp_layout(shapes, "float32", num_ranks=8, tensor_parallel=2, cut={"q": 0}, replicas=2)
    assert rows(layout, "q") == [(0, 2), (4, 6), (2, 4), (6, 8)] * 2
    assert rows(layout, "norm") == [(0, 2), (2, 4), (4, 6), None] * 2
    assert layout.num_bytes == 4 * (24 + 6)


def test_of_two_replicas_only_one_sends_an_element() -> None:
    source = fsdp_layout({"w": (8, 3)}, "float32", num_ranks=4, replicas=2)
    engine = EngineLayout(layout=mesh_layout({"w": (8, 3)}, "float32", 1, lambda _: ((1, None),)))
    made = plan(source, [engine], bucket_bytes=1000)
    sent = [sum(math.prod(move.shape) for move in made.moves_from(rank)) for rank in range(4)]
    assert sum(sent) == 24
    assert sent[0] + sent[2] == sent[1] + sent[3] == 12


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    dims=st.sampled_from([(0, 0), (0, 1), (0, None), (None, 0), (None, 1)]),
)
def test_meshes_cut_as_torch_does(
    shape: tuple[int, int], sizes: tuple[int, int], dims: tuple[int | None, int | None]
) -> None:
    if dims == (0, 0):  # FSDP2 above tensor parallelism, for which torch wants slices of one size
        shape = (shape[0] * sizes[1], shape[1])
    mesh: Mesh = ((sizes[0], dims[0]), (sizes[1], dims[1]))
    layout = mesh_layout({"w": shape}, "float32", sizes[0] * sizes[1], lambda _: mesh)
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    if dims == (0, 0):
        placements[0] = _StridedShard(0, split_factor=sizes[1])
    for rank, held in enumerate(layout.placements["w"].ranks):
        coordinates = list(divmod(rank, sizes[1]))
        local, start = _utils._compute_local_shape_and_global_offset(shape, sizes, coordinates, placements)
        if 0 in local:
            assert held == ()
        else:
            stop = tuple(first + extent for first, extent in zip(start, local, strict=True))
            assert [(region.start, region.stop) for region in held] == [(tuple(start), stop)]
            assert held[0].strides == (local[1], 1)


def test_runs_of_elements() -> None:
    """10 elements in rows of 5, over 3 ranks: 4, 4 and 2 of them."""
    assert run_layout({"w": (2, 5)}, "float32", 3).placements["w"].ranks == (
        (Region(start=(0, 0), stop=(1, 4), offset=0, strides=(5, 1)),),
        (
            Region(start=(0, 4), stop=(1, 5), offset=0, strides=(5, 1)),
            Region(start=(1, 0), stop=(2, 3), offset=1, strides=(5, 1)),
        ),
        (Region(start=(1, 3), stop=(2, 5), offset=0, strides=(5, 1)),),
    )


@given(shape=st.lists(st.integers(1, 4), max_size=3).map(tuple), data=st.data())
def test_a_run_is_a_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first = data.draw(st.integers(0, order.size))
    last = data.draw(st.integers(first, order.size))
    boxes = run_boxes(shape, first, last)
    found = [order[tuple(map(slice, start, stop))] for start, stop, _ in boxes]
    assert sorted(int(each) for part in found for each in part.flat) == list(range(first, last))
    assert [int(part.flat[0]) for part in found] == [offset for *_, offset in boxes]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("mesh", [((2, 1),), ((3, 0),), ((2, 0), (2, None))])
def test_a_mesh_that_does_not_fit_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match="a mesh of 2 ranks must cut dimensions of the shape \\(4,\\); got"):
        mesh_layout({"w": (4,)}, "float32", 2, lambda _: mesh)


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlflow.weights.shape.landings, rlflow.weights.shape.plan; "
        "print([name for name in ('torch', 'ray', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
