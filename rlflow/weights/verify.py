"""Proof that a vLLM model computes with given weights.

On a CPU vLLM packs the weight of each linear layer into a kernel's own layout and drops the tensor, so a checksum of
the parameters covers little. But the layer applied to the rows of the identity gives its weight back, exactly: each
output is one product with 1 and sums of zeros. What is compared is therefore what the engine really multiplies with.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

_ROWS = 256
"""Rows of the identity that go through a layer at once; bounds the memory."""


class WeightReport(TypedDict):
    num_equal: int
    different: list[str]
    unverified: list[str]
    """Tensors which have no counterpart that can be read back, such as packed experts."""


def compare_weights(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> WeightReport:
    """Compare each tensor, named as in the checkpoint, with what the model holds or computes with."""
    report = WeightReport(num_equal=0, different=[], unverified=[])
    reader = _Reader(model, expected)
    for name, tensor in expected.items():
        found = reader.effective(name)
        if found is None:
            report["unverified"].append(name)
        elif all(torch.equal(each.to(tensor.dtype), tensor) for each in found):
            report["num_equal"] += 1
        else:
            report["different"].append(name)
    return report


class _Reader:
    """Reads weights back by checkpoint name; remembers the last unpacked layer, whose parts come one after another."""

    def __init__(self, model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
        self._modules = dict(model.named_modules())
        self._expected = expected
        mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._fused = {part: (fused, parts) for fused, parts in mapping.items() for part in parts}
        self._last: tuple[torch.nn.Module, torch.Tensor] | None = None

    def effective(self, name: str) -> list[torch.Tensor] | None:
        """Everything in the model that should equal the tensor `name`; None when there is nothing to read."""
        path, _, leaf = name.rpartition(".")
        module, first_row = self._locate(path, leaf)
        if module is None or getattr(module, leaf, None) is None:
            return None
        num_rows = len(self._expected[name])
        values = [getattr(module, leaf)]
        if leaf == "weight" and values[0].ndim <= 2 and hasattr(module, "cpu_linear"):
            values = [value for value in values if value.numel()]
            values += [self._unpack(each) for each in (module, *self._tied_to(module))]
        return [value[first_row : first_row + num_rows] for value in values] or None

    def _locate(self, path: str, leaf: str) -> tuple[torch.nn.Module | None, int]:
        """The module that holds a checkpoint module, and the row at which its part starts."""
        if path in self._modules:
            return self._modules[path], 0
        parent, _, last = path.rpartition(".")
        fused, parts = self._fused.get(last, ("", []))
        before = parts[: parts.index(last)] if last in parts else []
        rows = [self._expected.get(f"{parent}.{part}.{leaf}") for part in before]
        if any(each is None for each in rows):
            return None, 0
        return self._modules.get(f"{parent}.{fused}"), sum(len(each) for each in rows if each is not None)

    def _tied_to(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        weight = module._parameters["weight"]
        return [
            other
            for other in self._modules.values()
            if other is not module and other._parameters.get("weight") is weight and hasattr(other, "cpu_linear")
        ]

    def _unpack(self, module: torch.nn.Module) -> torch.Tensor:
        if self._last is None or self._last[0] is not module:
            self._last = (module, unpack_linear(module))
        return self._last[1]


def unpack_linear(module: torch.nn.Module) -> torch.Tensor:
    """The weight [outputs, inputs] that a vLLM CPU layer multiplies with."""
    layer: Any = module  # vLLM's linear layers and embeddings have no common class with these attributes
    num_inputs: int = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    columns: list[torch.Tensor] = []
    for first in range(0, num_inputs, _ROWS):
        rows = torch.zeros(min(_ROWS, num_inputs - first), num_inputs, dtype=layer.weight.dtype)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    return torch.cat(columns).t()
