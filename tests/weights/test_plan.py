"""The plan of a weight transfer: carried out on NumPy arrays, against loading the whole parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from generation_groups import generation_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import (
    LLAMA_3_70B,
    QWEN2_5_7B,
    empty,
    engine_layout_by_hand,
    execute,
    load,
    models,
    sources,
    whole,
)
from traffic import gathered, planned

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import Box, difference, intersection, num_elements, split
from rlflow.weights.shape.layout import (
    EngineLayout,
    Layout,
    Mesh,
    ParameterPlacement,
    Region,
    Shapes,
    fsdp_layout,
    mesh_layout,
)
from rlflow.weights.shape.plan import MOVES_IN_BUCKET, TransferPlan, plan


def fsdp(shapes: Shapes, ranks: int) -> Layout:
    return fsdp_layout(shapes, "float32", ranks)


def carry_out(made: TransferPlan) -> None:
    """Check that every element arrives once, where it belongs, and that the counted bytes are those moved."""
    values = whole(made.source)
    found = [[empty(each.layout, rank) for rank in range(each.layout.num_ranks)] for each in made.engines]
    moves = list(made.moves())
    execute(moves, load(made.source, values), found)
    for engine, tensors in zip(made.engines, found, strict=True):
        expected = load(engine.layout, values)
        for rank, arrays in enumerate(expected):
            for name, array in arrays.items():
                np.testing.assert_array_equal(tensors[rank][name], array)
    sent, received = Counter[int](), Counter[tuple[int, int]]()
    for move in moves:
        if not move.is_local:
            sent[move.source] += move.num_bytes
            received[move.engine, move.rank] += move.num_bytes
    assert [sent[rank] for rank in range(made.source.num_ranks)] == made.sent.tolist()
    for index, ranks in enumerate(made.received):
        assert [received[index, rank] for rank in range(len(ranks))] == ranks.tolist()


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Layout, list[EngineLayout], int]:
    model = draw(models())
    source = draw(sources(model.shapes()))
    engines = [
        EngineLayout(layout=engine_layout_by_hand(model, size), devices=draw(_devices(source.num_ranks, size)))
        for size in draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    ]
    return source, engines, draw(st.sampled_from([64, 200, 1 << 20]))


def _devices(num_ranks: int, size: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    if size > num_ranks:
        return st.none()
    return st.none() | st.permutations(range(num_ranks)).map(lambda ranks: tuple(ranks[:size]))


@settings(max_examples=60, deadline=None)
@given(transfer=transfers())
def test_every_element_arrives_once_where_it_belongs(transfer: tuple[Layout, list[EngineLayout], int]) -> None:
    source, engines, bucket_bytes = transfer
    carry_out(plan(source, engines, bucket_bytes))


@settings(max_examples=60, deadline=None)
@given(transfer=transfers())
def test_no_rank_is_sent_more_than_it_lacks(transfer: tuple[Layout, list[EngineLayout], int]) -> None:
    source, engines, bucket_bytes = transfer
    made = plan(source, engines, bucket_bytes)
    for engine, received in zip(engines, made.received, strict=True):
        for rank, num_bytes in enumerate(received.tolist()):
            on_device = 0 if engine.devices is None else _in_common(source, engine.devices[rank], engine.layout, rank)
            assert num_bytes == engine.layout.bytes_held(rank) - on_device
    assert made.sent.sum() == sum(received.sum() for received in made.received)


def _in_common(source: Layout, source_rank: int, layout: Layout, rank: int) -> int:
    """Bytes of the engine's rank that the trainer's rank holds, counted element by element."""
    total = 0
    for name, place in layout.placements.items():
        here = np.zeros(place.shape, dtype=bool)
        for region in source.placements[name].ranks[source_rank]:
            here[tuple(map(slice, region.start, region.stop))] = True
        for region in place.ranks[rank]:
            total += int(here[tuple(map(slice, region.start, region.stop))].sum()) * place.element_bytes
    return total


@settings(max_examples=60, deadline=None)
@given(transfer=transfers())
def test_ranks_that_hold_the_same_send_the_same_but_for_one_move(
    transfer: tuple[Layout, list[EngineLayout], int],
) -> None:
    source, engines, bucket_bytes = transfer
    made = plan(source, engines, bucket_bytes)
    alike: dict[object, list[int]] = {}
    for rank in range(source.num_ranks):
        held = tuple(place.ranks[rank] for place in source.placements.values())
        alike.setdefault(held, []).append(int(made.sent[rank]))
    largest = max(move.num_bytes for move in made.moves())
    assert largest <= bucket_bytes / MOVES_IN_BUCKET
    assert all(max(sent) - min(sent) <= largest for sent in alike.values())


@settings(max_examples=60, deadline=None)
@given(transfer=transfers())
def test_buckets_are_bounded_and_in_the_same_order_for_everybody(
    transfer: tuple[Layout, list[EngineLayout], int],
) -> None:
    source, engines, bucket_bytes = transfer
    made = plan(source, engines, bucket_bytes)
    moves = list(made.moves())
    assert [move.bucket for move in moves] == sorted(move.bucket for move in moves)
    assert made.num_buckets == 1 + max(move.bucket for move in moves)
    ports = Counter[object]()
    for move in moves:
        if not move.is_local:
            ports[move.bucket, "out", move.source] += move.num_bytes
            ports[move.bucket, "in", move.engine, move.rank] += move.num_bytes
    assert max(ports.values(), default=0) <= bucket_bytes
    for rank in range(source.num_ranks):
        assert list(made.moves_from(rank)) == [move for move in moves if move.source == rank]
    for index, engine in enumerate(engines):
        for rank in range(engine.layout.num_ranks):
            wanted = [move for move in moves if (move.engine, move.rank) == (index, rank)]
            assert list(made.moves_to(index, rank)) == wanted


def test_rows_to_a_fused_tensor_literally() -> None:
    """Keys [4, 3] lie on two ranks; each rank of the engine has two of their rows, behind one row of queries."""
    ranks = tuple((Region(start=(2 * rank, 0), stop=(2 * rank + 2, 3), offset=3, strides=(3, 1)),) for rank in (0, 1))
    keys = ParameterPlacement(shape=(4, 3), dtype="bfloat16", tensors=("qkv",), ranks=ranks)
    made = plan(fsdp({"k": (4, 3)}, ranks=3), [EngineLayout(layout=Layout(num_ranks=2, placements={"k": keys}))])
    # torch cuts 4 rows for 3 ranks as 2, 2, 0.
    assert [(m.source, m.source_offset, m.rank, m.offset, m.shape, m.num_bytes) for m in made.moves()] == [
        (0, 0, 0, 3, (2, 3), 12),
        (1, 0, 1, 3, (2, 3), 12),
    ]
    assert (made.sent.tolist(), made.received[0].tolist(), made.num_buckets) == ([12, 12, 0], [12, 12], 1)


def test_a_parameter_that_the_engine_keeps_twice_is_sent_twice() -> None:
    regions = tuple(Region(start=(0,), stop=(4,), offset=0, strides=(1,), tensor=tensor) for tensor in (0, 1))
    tied = ParameterPlacement(shape=(4,), dtype="float32", tensors=("embedding", "head"), ranks=(regions,))
    made = plan(fsdp({"w": (4,)}, ranks=2), [EngineLayout(layout=Layout(num_ranks=1, placements={"w": tied}))])
    assert sorted((move.source, move.tensor, move.offset) for move in made.moves()) == [
        (0, "embedding", 0),
        (0, "head", 0),
        (1, "embedding", 2),
        (1, "head", 2),
    ]
    assert made.received[0].tolist() == [32]


def test_copies_share_the_work() -> None:
    shapes = {str(index): (8, 8) for index in range(12)}
    source = mesh_layout(shapes, "float32", 4, lambda _: ((4, None),))
    made = plan(source, [EngineLayout(layout=fsdp(shapes, ranks=2))], bucket_bytes=8 * 128)
    assert made.sent.tolist() == [768] * 4


def test_overlapping_holders_still_send_each_element_once() -> None:
    """Ranks 0 and 1 hold rows [0, 3) and [1, 4); the engine's device is that of rank 1."""
    held = tuple((Region(start=(first, 0), stop=(first + 3, 2), offset=0, strides=(2, 1)),) for first in (0, 1))
    source = Layout(
        num_ranks=2, placements={"w": ParameterPlacement(shape=(4, 2), dtype="float32", tensors=("w",), ranks=held)}
    )
    made = plan(source, [EngineLayout(layout=fsdp({"w": (4, 2)}, ranks=1), devices=(1,))])
    carry_out(made)
    assert (made.sent.tolist(), made.received[0].tolist()) == ([8, 0], [8])


def test_hybridflow_example() -> None:
    """8 ranks from 1-4-2 to 1-2-2-2 (arXiv:2409.19256, figure 8), numbered from 0."""
    groups = generation_groups(data_parallel=2, tensor_parallel=4, engine_tensor_parallel=2)
    assert groups.tensor == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups.micro_data == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 4, 2), (1, 4, 4), (3, 2, 1), (2, 8, 2)])
def test_colocated_ranks_keep_what_they_have_and_take_the_rest_from_their_group(sizes: tuple[int, int, int]) -> None:
    """Each receives (d - 1) / t of the model, all of it within its group for generation's data parallelism."""
    copies, trained, generated = sizes
    shapes = {"up": (16, 8), "down": (8, 16)}

    def mesh(size: int) -> Callable[[str], Mesh]:
        return lambda name: ((size, int(name == "down")),)

    def copied(name: str) -> Mesh:
        return ((copies, None), *mesh(trained)(name))

    source = mesh_layout(shapes, "bfloat16", copies * trained, copied)
    layout = mesh_layout(shapes, "bfloat16", generated, mesh(generated))
    groups = generation_groups(copies, trained, generated)
    made = plan(source, groups.engines(layout))
    carry_out(made)
    group_of = {rank: group for group in groups.micro_data for rank in group}
    for move in made.moves():
        assert move.source in group_of[groups.tensor[move.engine][move.rank]]
    micro_data = trained // generated
    for engine, received in zip(made.engines, made.received, strict=True):
        for rank, num_bytes in enumerate(received.tolist()):
            assert num_bytes * trained == (micro_data - 1) * layout.num_bytes
            # No redundant memory: all that the rank has trained is part of what it generates with.
            assert engine.devices is not None
            assert layout.bytes_held(rank) - num_bytes == source.bytes_held(engine.devices[rank])


@pytest.mark.parametrize("size", [3, 8])
def test_groups_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"must divide the trainer's \\(4\\) where they share devices; got {size}"):
        generation_groups(data_parallel=2, tensor_parallel=4, engine_tensor_parallel=size)


def test_layouts_of_different_models_are_refused() -> None:
    engine = EngineLayout(layout=fsdp({"w": (4,)}, ranks=1))
    with pytest.raises(
        ConfigError, match="1 parameters are on one side of the transfer only, such as 'head' in the tr"
    ):
        plan(fsdp({"w": (4,), "head": (2,)}, ranks=2), [engine])
    with pytest.raises(ConfigError, match="parameter 'w' must have one shape; the trainer has \\(5,\\), engine 0 has"):
        plan(fsdp({"w": (5,)}, ranks=2), [engine])


def test_elements_that_nobody_may_send_are_refused() -> None:
    engine = EngineLayout(layout=fsdp({"w": (4,)}, ranks=1), senders=frozenset({0}))
    with pytest.raises(
        ConfigError, match="2 elements of parameter 'w' between \\(0,\\) and \\(4,\\) are held by no rank"
    ):
        plan(fsdp({"w": (4,)}, ranks=2), [engine])


def test_a_bucket_too_small_for_eight_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match="a bucket must have at least 64 bytes; got 63"):
        plan(fsdp({"w": (4,)}, ranks=1), [], bucket_bytes=63)


BOXES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=2, max_size=2).map(
    lambda sides: (tuple(first for first, _ in sides), tuple(first + size for first, size in sides))
)


@given(one=BOXES, other=BOXES, limit=st.integers(1, 5))
def test_parts_of_boxes(one: Box, other: Box, limit: int) -> None:
    def count(boxes: list[Box]) -> np.ndarray:
        found = np.zeros((6, 6), dtype=int)
        for start, stop in boxes:
            found[tuple(map(slice, start, stop))] += 1
        return found

    common = intersection(one, other)
    np.testing.assert_array_equal(count([common] if common else []), count([one]) * count([other]))
    np.testing.assert_array_equal(count(difference(one, other)), count([one]) * (1 - count([other])))
    parts = list(split(*one, limit))
    np.testing.assert_array_equal(count(parts), count([one]))
    assert all(num_elements(*part) <= limit for part in parts)


def test_7b_to_two_engines_of_four() -> None:
    """FSDP2 over 8 ranks. A plan moves two copies of the model and its copied norms and heads, not 15 copies."""
    engines = [EngineLayout(layout=engine_layout_by_hand(QWEN2_5_7B, 4))] * 2
    source = fsdp_layout(QWEN2_5_7B.shapes(), "bfloat16", num_ranks=8)
    made = plan(source, engines)
    size = 15_231_233_024
    assert source.num_bytes == size
    norms = 2 * 3584 * (2 * 28 + 1)
    assert made.received[0].tolist() == [(size - norms) // 4 + norms] * 4
    assert made.sent.max() <= 1.01 * made.sent.mean()
    assert planned(made).total == 8 * ((size - norms) // 4 + norms)
    other = gathered(source, engines)
    assert (other.total, other.largest) == (7 * size + 8 * size, size)


def test_70b_from_64_ranks_to_eight_engines_of_eight() -> None:
    """A million and a half moves, planned from the few ways in which parameters lie."""
    source = fsdp_layout(LLAMA_3_70B.shapes(), "bfloat16", num_ranks=64)
    engines = [EngineLayout(layout=engine_layout_by_hand(LLAMA_3_70B, 8))] * 8
    made = plan(source, engines)
    norms = 2 * 8192 * (2 * 80 + 1)
    share = (source.num_bytes - norms) // 8 + norms
    assert all(received.tolist() == [share] * 8 for received in made.received)
    assert made.sent.sum() == 64 * share
    # Rows of 8192 and more divide by 64: all send the same.
    assert made.sent.tolist() == [share] * 64
    assert made.num_buckets <= 1.5 * share / (128 * 2**20)
    assert gathered(source, engines).total == (63 + 64) * source.num_bytes
