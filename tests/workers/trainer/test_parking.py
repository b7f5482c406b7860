"""What is parked comes back bit for bit, and its place is allocated once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.workers.trainer.parking import ParkingSpace

CPU = torch.device("cpu")


def some_tensors() -> list[Tensor]:
    """One over several chunks, one view that shares its storage, one that is empty."""
    whole = torch.arange(1000, dtype=torch.float32)
    return [whole, whole[10:20], torch.tensor([7], dtype=torch.int64), torch.empty(0), torch.arange(6.0).view(2, 3).t()]


def test_what_is_parked_comes_back() -> None:
    tensors = some_tensors()
    expected = [each.clone() for each in tensors]
    space = ParkingSpace(CPU, chunk_bytes=1024)
    space.park(tensors)
    assert space.num_bytes == 4000 + 8 + 24
    assert [each.untyped_storage().nbytes() for each in tensors] == [0] * 5
    space.unpark()
    assert space.num_bytes == 0
    assert all(torch.equal(each, there) for each, there in zip(tensors, expected, strict=True))
    assert tensors[1].untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
    space.unpark()
    assert all(torch.equal(each, there) for each, there in zip(tensors, expected, strict=True))


def test_the_place_is_allocated_once() -> None:
    tensors = some_tensors()
    space = ParkingSpace(CPU, chunk_bytes=1024)
    places = []
    for value in (1.0, 2.0, 3.0):
        tensors[0].fill_(value)
        space.park(tensors)
        places.append([chunk.data_ptr() for chunk in space._chunks])
        space.unpark()
        assert tensors[0].eq(value).all()
    assert len(places[0]) == 4  # 4,032 bytes
    assert places[0] == places[1] == places[2]
    # More, as when the optimiser has made its moments: what there is stays where it is.
    space.park([*tensors, torch.ones(1000)])
    assert [chunk.data_ptr() for chunk in space._chunks[:4]] == places[0]
    assert len(space._chunks) == 8


def test_nothing_is_emptied_if_there_is_no_room() -> None:
    tensors = some_tensors()
    space = ParkingSpace(CPU, chunk_bytes=2**62)
    with pytest.raises(RuntimeError, match="alloc"):
        space.park(tensors)
    assert space.num_bytes == 0
    assert tensors[0].tolist() == list(range(1000))


def test_what_lies_elsewhere_stays() -> None:
    space, there = ParkingSpace(CPU), torch.empty(5, device="meta")
    space.park([there])
    assert space.num_bytes == 0
    assert not space._chunks
