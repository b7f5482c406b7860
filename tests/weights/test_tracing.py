"""What a loader's copies are taken for, against NumPy; and loaders that do more than copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from rlflow.errors import ConfigError, NotACopy
from rlflow.weights.engine.tracing import trace_loading
from rlflow.weights.shape.landings import Axis, Landing, merged, regions_of
from rlflow.weights.shape.layout import Region

Numbers = NDArray[np.int64]
Named = Iterable[tuple[str, Tensor]]


@st.composite
def views(draw: st.DrawFn, array: Numbers) -> Numbers:
    """Reshaped, sliced, reversed in the order of its dimensions."""
    if draw(st.booleans()):
        array = array.reshape(draw(st.sampled_from([(-1,), (2, -1), (-1, 3), (2, 2, -1), (2, 3, -1), (4, 6)])))
    steps = [
        slice(draw(st.integers(0, size)), draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 2])))
        for size in array.shape
    ]
    return array[tuple(steps)].transpose(draw(st.permutations(range(array.ndim))))


@st.composite
def copies(draw: st.DrawFn) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """A parameter, a view of it, a flat target and a view of that with the same shape."""
    parameter = np.arange(1, 25).reshape(draw(st.sampled_from([(24,), (4, 6), (2, 3, 4), (1, 24, 1), (2, 1, 12)])))
    source = draw(views(parameter))
    gaps = [draw(st.integers(0, 1)) for _ in source.shape]
    room = np.zeros([size + gap for size, gap in zip(source.shape, gaps, strict=True)], dtype=np.int64)
    order = draw(st.permutations(range(room.ndim)))
    room = np.zeros([room.shape[dim] for dim in order], dtype=np.int64)
    target = room.transpose(np.argsort(order))[tuple(map(slice, source.shape))]
    return parameter, source, room, target


def offset_in(view: Numbers, whole: Numbers) -> int:
    return (view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize


@settings(max_examples=300, deadline=None)
@given(copy=copies(), cut=st.booleans())
def test_any_copy_between_views_is_a_few_regions(copy: tuple[Numbers, Numbers, Numbers, Numbers], cut: bool) -> None:
    parameter, source, room, target = copy
    halves = [(source, target)]
    if cut and source.ndim and source.shape[0] > 1:
        halves = [(source[:1], target[:1]), (source[1:], target[1:])]
    regions = merged(
        [
            region
            for here, there in halves
            for region in regions_of(
                parameter.shape,
                offset_in(here, parameter),
                [
                    Axis(extent=extent, here=one // 8, there=other // 8)
                    for extent, one, other in zip(here.shape, here.strides, there.strides, strict=True)
                ],
                offset_in(there, room),
            )
        ]
    )
    found = np.zeros_like(room).ravel()
    for region in regions:
        for index in np.ndindex(*(last - first for first, last in zip(region.start, region.stop, strict=True))):
            at = tuple(first + step for first, step in zip(region.start, index, strict=True))
            assert found[region.offset_of(at)] == 0
            found[region.offset_of(at)] = parameter[at]
    target[...] = source
    np.testing.assert_array_equal(found, room.ravel())


def test_rows_copied_one_by_one_are_one_region() -> None:
    rows = [
        region
        for row in (2, 0, 1)
        for region in regions_of((4, 3), 3 * row, [Axis(extent=3, here=1, there=1)], 50 + 6 * row)
    ]
    assert merged(rows) == (Region(start=(0, 0), stop=(3, 3), offset=50, strides=(6, 1)),)


def test_rows_at_uneven_distances_stay_apart() -> None:
    rows = [
        region
        for row, there in ((0, 0), (1, 3), (2, 7))
        for region in regions_of((3, 3), 3 * row, [Axis(extent=3, here=1, there=1)], there)
    ]
    assert [(region.start, region.stop, region.offset) for region in merged(rows)] == [
        ((0, 0), (2, 3), 0),
        ((2, 0), (3, 3), 7),
    ]


class Fused(nn.Module):
    """Two matrices in one, a transposed one, an embedding with a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.full((4, 3), 7.0))
        self.turned = nn.Parameter(torch.full((3, 2), 7.0, dtype=torch.bfloat16))
        self.embedding = nn.Parameter(torch.full((3, 2), 7.0))

    def load(self, weights: Named) -> None:
        for name, weight in weights:
            if name in ("gate", "up"):
                self.gate_up.data.narrow(0, 2 * (name == "up"), 2).copy_(weight[1:3])
            elif name == "turned":
                self.turned.data.copy_(weight.t())
            elif name == "embedding":
                self.embedding[: len(weight)].data.copy_(weight)
                self.embedding[len(weight) :].data.fill_(0)


SHAPES = {"gate": (4, 3), "up": (4, 3), "turned": (2, 3), "embedding": (2, 2), "tied": (2, 2)}


def test_a_loader_that_copies_is_understood_and_writes_nothing() -> None:
    model = Fused()

    def region(start: tuple[int, ...], stop: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Region:
        return Region(start=start, stop=stop, offset=offset, strides=strides)

    def landing(tensor: str, region: Region, dtype: str = "float32") -> list[Landing]:
        return [Landing(tensor=tensor, dtype=dtype, regions=(region,))]

    assert trace_loading(model, model.load, SHAPES, torch.float32) == {
        "gate": landing("gate_up", region((1, 0), (3, 3), 0, (3, 1))),
        "up": landing("gate_up", region((1, 0), (3, 3), 6, (3, 1))),
        "turned": landing("turned", region((0, 0), (2, 3), 0, (1, 2)), "bfloat16"),
        "embedding": landing("embedding", region((0, 0), (2, 2), 0, (2, 1))),
    }
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))


def _replace(weight: nn.Parameter, given: Tensor) -> None:
    weight.data = given


def _overwrite(weight: nn.Parameter, given: Tensor) -> None:
    weight.data.copy_(given)
    weight.data[3:].fill_(0)


def _copy_twice(weight: nn.Parameter, given: Tensor) -> None:
    weight.data[:3].copy_(given[:3])
    weight.data[2:].copy_(given[2:])


LOADERS: dict[str, tuple[Callable[[nn.Parameter, Tensor], object], str]] = {
    "scaled": (lambda weight, given: weight.data.copy_(given * 2), "computes with 'w' (aten.mul.Tensor)"),
    "negated": (
        lambda weight, given: weight.data.copy_(torch.ops.aten._neg_view(given)),
        "takes 'w' for something else",
    ),
    "other bits": (lambda weight, given: weight.data.copy_(given.view(torch.int32)), "takes 'w' for something else"),
    "looked at": (lambda weight, given: bool(given.sum() > 0), "computes with 'w' (aten.sum.default)"),
    "put aside": (lambda weight, given: weight.data.copy_(given.clone()), "computes with 'w' (aten.clone.default)"),
    "copied elsewhere": (
        lambda weight, given: torch.zeros(4, 3).copy_(given),
        "computes with 'w' (aten.copy_.default)",
    ),
    "added": (lambda weight, given: weight.data.add_(given), "writes something else than a parameter to 'weight'"),
    "constant": (lambda weight, given: weight.data.copy_(torch.ones(4, 3)), "writes something else than a parameter"),
    "changed in place": (lambda weight, given: given.mul_(2), "computes with 'w' (aten.mul_.Tensor)"),
    "replaced": (_replace, "puts another tensor in the place of 'weight'"),
    "overwritten": (_overwrite, "clears a part of 'weight' that it has copied a parameter to"),
    "twice": (_copy_twice, "copies both 'w' and 'w' to the same elements of 'weight'"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_does_more_than_copy_is_refused(kind: str) -> None:
    act, message = LOADERS[kind]
    with torch.device("meta"):
        model = One()

    def load(weights: Named) -> None:
        for _, weight in weights:
            act(model.weight, weight)

    with pytest.raises(NotACopy) as refused:
        trace_loading(model, load, {"w": (4, 3)}, torch.float32)
    assert message in str(refused.value)


def test_a_tensor_in_several_pieces_is_refused() -> None:
    model = One()
    model.weight = nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(NotACopy, match="tensor 'weight' does not lie in one piece"):
        trace_loading(
            model, lambda weights: [model.weight.data.copy_(w) for _, w in weights], {"w": (4, 3)}, torch.float32
        )


def test_missing_and_unknown_parameters_are_refused() -> None:
    model = Fused()
    shapes = {name: shape for name, shape in SHAPES.items() if name != "turned"}
    with pytest.raises(ConfigError, match="1 tensors of Fused are filled from no parameter, such as 'turned'"):
        trace_loading(model, model.load, shapes, torch.float32)

    def load(weights: Named) -> None:
        raise KeyError(next(iter(weights))[0])

    with pytest.raises(ConfigError, match="Fused does not take these parameters: 'gate'"):
        trace_loading(model, load, SHAPES, torch.float32)
