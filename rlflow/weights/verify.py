"""Proof that a vLLM worker computes with given weights.

On a CPU vLLM packs the weight of each linear layer into a kernel's own layout and drops the tensor, so a checksum of
the parameters covers little. But the layer applied to the rows of the identity gives its weight back, exactly: each
output is one product with 1 and sums of zeros. What is compared is therefore what the engine really multiplies with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.weights.engine_tensors import box_of, is_plain, view_of
from rlflow.weights.layout import Region
from rlflow.weights.messages import WeightReport
from rlflow.weights.tracing import Landing

_ROWS = 256
"""Rows of the identity that go through a layer at once; bounds the memory."""


def compare_weights(
    model: nn.Module, landings: Mapping[str, Sequence[Landing]], expected: Iterable[tuple[str, Tensor]]
) -> WeightReport:
    """Compare each parameter, whole and by its Hugging Face name, with this worker's part of it.

    A part of which the worker holds nothing counts as equal. What `landings` says nothing of is unverified.
    """
    report = WeightReport(num_equal=0, different=[], unverified=[])
    reader = _Reader(model)
    for name, tensor in expected:
        places = [(each.tensor, region) for each in landings.get(name, ()) for region in each.regions]
        found = {place: reader.effective(place) for place, _ in places}
        if name not in landings or not all(found.values()):
            report["unverified"].append(name)
        elif all(_holds(each, region, tensor) for place, region in places for each in found[place]):
            report["num_equal"] += 1
        else:
            report["different"].append(name)
    return report


def compare_tensors(model: nn.Module, expected: Mapping[str, Tensor]) -> WeightReport:
    """Compare each of the worker's tensors, by its name in the model, with what it should be."""
    report = WeightReport(num_equal=0, different=[], unverified=[])
    reader = _Reader(model)
    for name, tensor in expected.items():
        found = reader.effective(name)
        if not found:
            report["unverified"].append(name)
        elif all(torch.equal(each, tensor) for each in found):
            report["num_equal"] += 1
        else:
            report["different"].append(name)
    return report


def _holds(tensor: Tensor, region: Region, whole: Tensor) -> bool:
    return torch.equal(view_of(tensor.contiguous(), region).to(whole), box_of(whole, region))


class _Reader:
    """Reads a worker's tensors back; remembers the last unpacked one, whose parts come one after another."""

    def __init__(self, model: nn.Module) -> None:
        self._live = dict(model.named_parameters())
        self._owners: dict[int, list[Any]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self._owners.setdefault(id(parameter), []).append(module)
        self._last: tuple[str, list[Tensor]] | None = None

    def effective(self, name: str) -> list[Tensor]:
        """Everything that the model computes with for the tensor of this name; nothing if it cannot be read."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._read(name))
        return self._last[1]

    def _read(self, name: str) -> list[Tensor]:
        live = self._live[name]
        owners = self._owners[id(live)]
        if live.device.type == "cpu" and not all(map(is_plain, owners)):
            return []
        packed = [owner for owner in owners if owner._parameters.get("weight") is live and hasattr(owner, "cpu_linear")]
        return [live.detach()] * bool(live.numel()) + [unpack_linear(owner) for owner in packed]


def unpack_linear(module: nn.Module) -> Tensor:
    """The weight [outputs, inputs] that a vLLM CPU layer multiplies with."""
    layer: Any = module  # vLLM's linear layers and embeddings have no common class with these attributes
    num_inputs: int = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    columns: list[Tensor] = []
    for first in range(0, num_inputs, _ROWS):
        rows = torch.zeros(min(_ROWS, num_inputs - first), num_inputs, dtype=layer.weight.dtype)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    return torch.cat(columns).t()
