"""Proof that a vLLM worker computes with given weights.

On a CPU vLLM packs the weight of each linear layer into a kernel's own layout and drops the tensor, so a checksum of
the parameters covers little. But the layer applied to the rows of the identity gives its weight back, exactly: each
output is one product with 1 and sums of zeros. What is compared is therefore what the engine really multiplies with.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rlflow.weights.engine.messages import NUM_VERIFIED, Columns, WeightReport
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Region

_ROWS = 256
"""Rows of the identity that go through a layer at once; bounds the memory."""
_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


def is_plain(module: Any) -> bool:
    """Whether a layer computes with its weights as they are loaded, or with a packed copy of them.

    Experts do if their kernel is Triton's, which is vLLM's choice on Hopper; for the others it swaps halves or shuffles
    (vLLM 0.32, `fused_moe/oracle/unquantized.py`), and when it balances experts they change places.
    """
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend in _AS_LOADED and not method.moe.moe_parallel_config.enable_eplb
    return method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)


def sampled(tensors: Mapping[str, Tensor], columns: Columns | None) -> dict[str, Tensor]:
    """The tensors of which columns are compared; without a choice of columns all of them."""
    names = sorted(tensors)
    if columns is not None:
        names = random.Random(columns.seed).sample(names, min(NUM_VERIFIED, len(names)))
    return {name: tensors[name] for name in names}


def compare_weights(
    model: nn.Module,
    landings: Landings,
    expected: Iterable[tuple[str, Tensor]],
    columns: Columns | None = None,
) -> WeightReport:
    """Compare each parameter, which is given whole, with this worker's part of it.

    With `columns`, only some columns of each of the worker's matrices are read, so that it takes milliseconds.
    A parameter of which the worker holds nothing counts as equal. One that `landings` does not name is unverified.
    """
    report = WeightReport(num_equal=0, different=[], unverified=[])
    reader = _Reader(model, columns)
    for name, tensor in expected:
        places = [(each.tensor, region) for each in landings.get(name, ()) for region in each.regions]
        found = {place: reader.effective(*place) for place in places}
        if name not in landings or not all(found.values()):
            report["unverified"].append(name)
        elif all(each.holds(region, tensor) for (_, region), parts in found.items() for each in parts):
            report["num_equal"] += 1
        else:
            report["different"].append(name)
    return report


@dataclass(kw_only=True, slots=True, frozen=True)
class _Read:
    """What was read of a tensor: columns `first` and on of one that is `width` wide, or all of it."""

    values: Tensor
    first: int = 0
    width: int | None = None

    def holds(self, region: Region, whole: Tensor) -> bool:
        """Whether the region, as far as it was read, is equal to its box of the parameter."""
        part, count = region, self.values.shape[-1]
        if self.width is not None:
            row, column = divmod(region.offset, self.width)
            start = max(column, self.first)
            stop = min(column + region.stop[1] - region.start[1], self.first + count)
            if start >= stop:
                return True
            skipped = region.start[1] - column
            part = replace(
                region,
                start=(region.start[0], start + skipped),
                stop=(region.stop[0], stop + skipped),
                offset=row * count + start - self.first,
                strides=(count, 1),
            )
        return torch.equal(part.view_of(self.values.contiguous()).to(whole), part.box_of(whole))


class _Reader:
    """Reads a worker's tensors back; remembers the last unpacked one, whose parts come one after another."""

    def __init__(self, model: nn.Module, columns: Columns | None) -> None:
        self._columns = columns
        self._live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self._owners: dict[int, list[Any]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self._owners.setdefault(id(parameter), []).append(module)
        self._last: tuple[str, bool, list[_Read]] | None = None

    def effective(self, name: str, region: Region) -> list[_Read]:
        """All that the model computes with for the tensor of this name; nothing if it cannot be read.

        As many columns of it as were asked for, if `region` lies in its rows as they are.
        """
        live = self._live[name]
        owners = self._owners.get(id(live), [])
        # On a CPU the weight of a linear layer's convolution is packed in its place, and nothing unpacks it.
        if any(not is_plain(owner) or hasattr(owner, "_cpu_unpacked_conv_weight") for owner in owners):
            return []
        packed = [owner for owner in owners if owner._parameters.get("weight") is live and hasattr(owner, "cpu_linear")]
        width = num_inputs(packed[0]) if packed else live.shape[-1] if live.dim() else 1
        narrows = self._columns is not None and len(region.start) == 2 and region.strides == (width, 1)
        if self._last is None or self._last[:2] != (name, narrows):
            first, last = 0, width
            if narrows and self._columns is not None:
                first = self._columns.first(name, width)
                last = min(first + self._columns.count, width)
            read = [live.detach()[..., first:last]] * bool(live.numel())
            read += [unpack_linear(owner, first, last) for owner in packed]
            found = [_Read(values=each, first=first, width=width if narrows else None) for each in read]
            self._last = (name, narrows, found)
        return self._last[2]


def num_inputs(module: nn.Module) -> int:
    """The inputs of a vLLM layer that multiplies with a packed weight."""
    # vLLM's linear layers, cut for ranks or not, and its embeddings have no attribute for it in common.
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return next(getattr(module, name) for name in names if hasattr(module, name))


def unpack_linear(module: nn.Module, first: int, last: int) -> Tensor:
    """Columns [first, last) of the weight [outputs, inputs] that a vLLM CPU layer multiplies with."""
    layer: Any = module
    inputs = num_inputs(module)
    columns: list[Tensor] = []
    for start in range(first, last, _ROWS):
        rows = torch.zeros(min(_ROWS, last - start), inputs, dtype=layer.weight.dtype)
        rows[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = 1
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    return torch.cat(columns).t()
