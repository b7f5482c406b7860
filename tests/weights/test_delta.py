"""What is found to have changed, and where it lands, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.weights.disk.delta import Changes, bits, changed, land, land_box, position_dtype, positions_in
from rlflow.weights.shape.boxes import Index
from rlflow.weights.shape.layout import Region


@st.composite
def boxes(draw: st.DrawFn, shape: Index) -> tuple[Index, Index]:
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(starts), tuple(draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True))


@st.composite
def regions(draw: st.DrawFn, shape: Index) -> tuple[Region, int]:
    """A box of a parameter anywhere in a larger tensor, its dimensions in any order; and the size of that tensor."""
    start, stop = draw(boxes(shape))
    extents = [last - first for first, last in zip(start, stop, strict=True)]
    strides, stride = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        if extents[dim] > 1:  # what a loader's copy says of the others is 0
            strides[dim] = stride
            stride = stride * extents[dim] + draw(st.integers(0, 2))
    offset = draw(st.integers(0, 3))
    return Region(start=start, stop=stop, offset=offset, strides=tuple(strides)), offset + stride + draw(
        st.integers(0, 3)
    )


def landed(parameter: Tensor, region: Region, start: Index, stop: Index, size: int) -> list[int]:
    """The target's bits, element by element; 0 where nothing lands."""
    target = [0] * size
    for index in np.ndindex(*parameter.shape):
        here = [max(a, b) <= at < min(c, d) for at, a, b, c, d in zip(
            index, start, region.start, stop, region.stop, strict=True)]  # fmt: skip
        if all(here):
            target[region.offset_of(index)] = int(bits(parameter)[index])
    return target


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]))
def test_a_box_and_its_elements_land_where_the_region_says(
    data: st.DataObject, shape: Index, dtype: torch.dtype
) -> None:
    start, stop = data.draw(boxes(shape))
    region, size = data.draw(regions(shape))
    parameter = torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).float().to(dtype).reshape(shape)
    expected = landed(parameter, region, start, stop, size)
    box = parameter[tuple(map(slice, start, stop))]

    dense = torch.zeros(size, dtype=dtype)
    num_dense = land_box(dense, region, start, box)
    assert bits(dense).tolist() == expected

    local = torch.tensor(data.draw(st.permutations(range(box.numel()))), dtype=torch.int32)
    positions = positions_in(shape, start, stop, local)
    assert positions.dtype == torch.int32
    changes = torch.zeros(size, dtype=dtype)
    num_changes = land(changes, region, shape, positions, bits(box.reshape(-1))[local.long()].view(dtype))
    assert bits(changes).tolist() == expected
    assert num_dense == num_changes == sum(map(bool, expected))


def test_keys_and_values_in_a_fused_tensor() -> None:
    """Rank 1 of 2 has rows 2 and 3 of 4 of the keys, as rows 4 and 5 of its tensor of 8 rows."""
    region = Region(start=(2, 0), stop=(4, 3), offset=12, strides=(3, 1))
    target = torch.zeros(8, 3)
    assert land(target, region, (4, 3), torch.tensor([5, 6, 11]), torch.tensor([1.0, 2.0, 3.0])) == 2
    assert target[4].tolist() == [2.0, 0.0, 0.0]
    assert target[5].tolist() == [0.0, 0.0, 3.0]
    assert target.count_nonzero() == 2


def test_columns_of_a_row_parallel_layer() -> None:
    region = Region(start=(0, 2), stop=(2, 4), offset=0, strides=(2, 1))
    target = torch.zeros(2, 2)
    land(target, region, (2, 4), torch.tensor([1, 2, 7], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
    assert target.tolist() == [[2.0, 0.0], [0.0, 3.0]]


def test_rows_of_padding_stay_as_they_are() -> None:
    """A vocabulary of 3 in 4 rows."""
    target = torch.full((4, 2), 7.0)
    region = Region(start=(0, 0), stop=(3, 2), offset=0, strides=(2, 1))
    assert land_box(target, region, (2, 0), torch.tensor([[1.0, 2.0]])) == 2
    assert land_box(target, region, (0, 0), torch.empty(0, 2)) == 0
    assert target.tolist() == [[7.0, 7.0], [7.0, 7.0], [1.0, 2.0], [7.0, 7.0]]


def test_a_view_into_a_larger_tensor_is_written_in_its_place() -> None:
    memory = torch.zeros(10)
    region = Region(start=(0,), stop=(2,), offset=1, strides=(2,))
    land_box(memory[4:8], region, (0,), torch.tensor([1.0, 2.0]))
    land(memory[4:8], Region(start=(2,), stop=(3,), offset=2, strides=(1,)), (3,), torch.tensor([2]), torch.ones(1))
    assert memory.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 0, 0]


def test_elements_are_cast_only_where_that_is_meant() -> None:
    region = Region(start=(0,), stop=(1,), offset=0, strides=(1,))
    target = torch.zeros(1, dtype=torch.bfloat16)
    land_box(target, region, (0,), torch.tensor([1.00390625]))  # 1 + 2**-8, half-way, to even
    assert target.item() == 1.0
    with pytest.raises(AssertionError, match="bit for bit"):
        land(target, region, (1,), torch.tensor([0]), torch.ones(1))


def test_bits_are_compared_not_values() -> None:
    quiet = torch.tensor([0x7FC0, 0x7FC0, 0x0000, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([0x7FC0, 0x7FC1, -0x8000, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert changed(quiet, other).tolist() == [1, 2]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.integers(0, 40), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_changes_make_the_new_out_of_the_old(data: st.DataObject, size: int, dtype: torch.dtype) -> None:
    patterns = st.lists(st.sampled_from([0, 1, -1, 0x7FC0, -0x8000]), min_size=size, max_size=size)
    integer = bits(torch.empty(0, dtype=dtype)).dtype
    before, now = (torch.tensor(data.draw(patterns), dtype=integer).view(dtype) for _ in range(2))
    found = changed(before, now)
    assert len(found) == sum(a != b for a, b in zip(bits(before).tolist(), bits(now).tolist(), strict=True))
    region = Region(start=(0,), stop=(size,), offset=0, strides=(1,))
    land(before, region, (size,), found, now[found])
    assert torch.equal(bits(before), bits(now))


def test_positions_need_eight_bytes_only_in_huge_parameters() -> None:
    assert position_dtype(2**31 - 1) == torch.int32
    assert position_dtype(2**31) == torch.int64
    shape = (2**20, 2**12)
    positions = positions_in(shape, (2**20 - 1, 4), (2**20, 8), torch.tensor([3], dtype=torch.int32))
    assert positions.dtype == torch.int64
    assert positions.tolist() == [2**32 - 2**12 + 7]
    region = Region(start=(2**20 - 1, 0), stop=(2**20, 2**12), offset=0, strides=(0, 1))
    target = torch.zeros(2**12)
    land(target, region, shape, positions, torch.ones(1))
    assert torch.nonzero(target).tolist() == [[7]]


@pytest.mark.parametrize(
    ("changes", "is_delta"),
    [
        (Changes(num_changed=10, num_elements=100, delta_bytes=60, dense_bytes=200, num_without_base=0), True),
        (Changes(num_changed=11, num_elements=100, delta_bytes=66, dense_bytes=200, num_without_base=0), False),
        (Changes(num_changed=0, num_elements=100, delta_bytes=0, dense_bytes=200, num_without_base=1), False),
        (Changes(num_changed=0, num_elements=0, delta_bytes=0, dense_bytes=0, num_without_base=0), True),
    ],
)
def test_one_changed_element_in_ten_is_still_a_delta(changes: Changes, is_delta: bool) -> None:
    assert changes.is_delta == is_delta
    assert Changes.of(changes.counts()) == changes


def test_changes_of_ranks_add_up() -> None:
    one = Changes(num_changed=1, num_elements=4, delta_bytes=6, dense_bytes=8, num_without_base=0)
    other = Changes(num_changed=2, num_elements=8, delta_bytes=12, dense_bytes=16, num_without_base=1)
    total = Changes.of([sum(counts) for counts in zip(one.counts(), other.counts(), strict=True)])
    assert total.counts() == (3, 12, 18, 24, 1)
    assert total.density == 0.25
