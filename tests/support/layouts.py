"""Layouts of the Llama family, written down by hand, and the execution of a plan on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rlflow.weights.shape.boxes import Index, row_major
from rlflow.weights.shape.layout import (
    Layout,
    Mesh,
    ParameterPlacement,
    Region,
    Shapes,
    chunk_of,
    mesh_layout,
    run_layout,
)
from rlflow.weights.shape.plan import Move

Arrays = dict[str, NDArray[np.float64]]
"""A rank's tensors, flat."""


@dataclass(kw_only=True, frozen=True)
class Model:
    """Sizes of a model of the Llama or Qwen2 family."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    has_bias: bool = False
    """Of the projections to queries, keys and values."""
    is_tied: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, by their Hugging Face names."""
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        if self.has_bias:
            layer |= {f"self_attn.{each}_proj.bias": (queries if each == "q" else keys,) for each in "qkv"}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.is_tied else shapes | {"lm_head.weight": (self.vocabulary, self.hidden)}


QWEN2_5_7B = Model(
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    key_value_heads=4,
    head_dim=128,
    vocabulary=152064,
    has_bias=True,
)
LLAMA_3_70B = Model(
    layers=80, hidden=8192, intermediate=28672, heads=64, key_value_heads=8, head_dim=128, vocabulary=128256
)


def engine_layout_by_hand(model: Model, tensor_parallel: int, dtype: str = "bfloat16") -> Layout:
    """What vLLM makes of such a model."""
    placements = {name: _place(model, name, shape, tensor_parallel, dtype) for name, shape in model.shapes().items()}
    return Layout(num_ranks=tensor_parallel, placements=placements)


def _place(model: Model, name: str, shape: Index, count: int, dtype: str) -> ParameterPlacement:
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    kind = module.removesuffix("_proj")
    if kind in "qkv":
        tensor = f"{parent}.qkv_proj.{leaf}"
        ranks = [_fused_heads(model, kind, shape, rank, count) for rank in range(count)]
    elif kind in ("gate", "up"):
        tensor = f"{parent}.gate_up_proj.{leaf}"
        first = model.intermediate // count if kind == "up" else 0
        ranks = [_rows(shape, *chunk_of(shape[0], rank, count), first) for rank in range(count)]
    elif kind in ("embed_tokens", "lm_head"):
        tensor = name
        padded = -(-shape[0] // 64) * 64 // count
        ranks = [
            _rows(shape, min(rank * padded, shape[0]), min((rank + 1) * padded, shape[0])) for rank in range(count)
        ]
    elif kind in ("o", "down"):
        tensor = name
        ranks = [_columns(shape, *chunk_of(shape[1], rank, count)) for rank in range(count)]
    else:
        tensor, ranks = name, [_rows(shape, 0, shape[0])] * count
    return ParameterPlacement(shape=shape, dtype=dtype, tensors=(tensor,), ranks=tuple(ranks))


def _fused_heads(model: Model, kind: str, shape: Index, rank: int, count: int) -> tuple[Region, ...]:
    """Queries, then keys, then values; a rank has at least one head of each, if need be the same as another rank."""
    queries = model.heads // count * model.head_dim
    copies = max(1, count // model.key_value_heads)
    keys = max(1, model.key_value_heads // count) * model.head_dim
    if kind == "q":
        return _rows(shape, rank * queries, (rank + 1) * queries)
    first = rank // copies * keys
    return _rows(shape, first, first + keys, queries + (keys if kind == "v" else 0))


def _rows(shape: Index, first: int, last: int, at_row: int = 0) -> tuple[Region, ...]:
    if first == last:
        return ()
    strides = row_major(shape)
    start, stop = (first, *(0 for _ in shape[1:])), (last, *shape[1:])
    return (Region(start=start, stop=stop, offset=at_row * strides[0], strides=strides),)


def _columns(shape: Index, first: int, last: int) -> tuple[Region, ...]:
    return (Region(start=(0, first), stop=(shape[0], last), offset=0, strides=(last - first, 1)),)


def tensor_dim(name: str) -> int | None:
    """The dimension that tensor parallelism cuts."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1
    return None if "norm" in name else 0


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Fused and repeated heads, padded vocabularies, ranks without a row."""
    return Model(
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 5)),
        intermediate=4 * draw(st.integers(1, 3)),
        heads=4,
        key_value_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.integers(1, 3)),
        vocabulary=draw(st.sampled_from([1, 3, 40, 70])),
        has_bias=draw(st.booleans()),
        is_tied=draw(st.booleans()),
    )


@st.composite
def sources(draw: st.DrawFn, shapes: Shapes) -> Layout:
    """Trainers: runs of elements, rows over all ranks or in copies, copies, tensor parallelism."""
    if draw(st.booleans()):
        return run_layout(shapes, "float32", draw(st.integers(1, 7)))
    one, other = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    meshes: dict[str, Callable[[str], Mesh]] = {
        "fsdp": lambda _: ((one * other, 0),),
        "hybrid": lambda _: ((one, None), (other, 0)),
        "copies": lambda _: ((one * other, None),),
        "tensor": lambda name: ((one, 0), (other, tensor_dim(name))),
    }
    return mesh_layout(shapes, "float32", one * other, meshes[draw(st.sampled_from(sorted(meshes)))])


def whole(layout: Layout) -> Arrays:
    """Each parameter, in its shape, with values that are found nowhere else."""
    values: Arrays = {}
    first = 1.0
    for name, place in layout.placements.items():
        size = math.prod(place.shape)
        values[name] = np.arange(first, first + size, dtype=np.float64).reshape(place.shape)
        first += size
    return values


def load(layout: Layout, values: Mapping[str, NDArray[np.float64]]) -> list[Arrays]:
    """The tensors of all ranks when each holds its part of the whole; 0 where there is nothing of any parameter."""
    ranks: list[Arrays] = []
    for rank in range(layout.num_ranks):
        tensors = empty(layout, rank)
        for name, place in layout.placements.items():
            for region in place.ranks[rank]:
                box = tuple(slice(first, last) for first, last in zip(region.start, region.stop, strict=True))
                part = values[name][box]
                _view(tensors[place.tensors[region.tensor]], part.shape, region.offset, region.strides)[...] = part
        ranks.append(tensors)
    return ranks


def empty(layout: Layout, rank: int) -> Arrays:
    """A rank's tensors, as large as the parameters need, filled with 0."""
    sizes: dict[str, int] = {}
    for place in layout.placements.values():
        for region in place.ranks[rank]:
            name = place.tensors[region.tensor]
            last = region.offset_of(tuple(stop - 1 for stop in region.stop))
            sizes[name] = max(sizes.get(name, 0), last + 1)
    return {name: np.zeros(size) for name, size in sizes.items()}


def execute(moves: Iterable[Move], sources: list[Arrays], engines: list[list[Arrays]]) -> None:
    """Carry a plan out; each element may be written once."""
    for move in moves:
        sent = _view(sources[move.source][move.source_tensor], move.shape, move.source_offset, move.source_strides)
        target = _view(engines[move.engine][move.rank][move.tensor], move.shape, move.offset, move.strides)
        assert not target.any(), f"{move} writes what was written before"
        target[...] = sent


def _view(flat: NDArray[np.float64], shape: Index, offset: int, strides: Index) -> NDArray[np.float64]:
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    assert 0 <= offset <= last < len(flat), "a region lies outside of its tensor"
    return as_strided(flat[offset:], shape, tuple(stride * flat.itemsize for stride in strides))
