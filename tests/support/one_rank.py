"""A trainer of one rank that holds a whole model, as senders see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from rlflow.weights.shape.layout import Layout, fsdp_layout


class OneRank:
    """Implements `WeightSource`, without the parts that only adapters need."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype

    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, self.dtype, tuple(each.shape)) for name, each in self.model.named_parameters()]

    def layout(self) -> Layout:
        shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        return fsdp_layout(shapes, "float32", 1)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self.model.named_parameters():
            yield name, each.detach().flatten()

    def add_up(self, values: Sequence[float]) -> list[float]:
        return list(values)

    @torch.no_grad()
    def change_a_little(self) -> None:
        """One element in 50, as an update of a model in bfloat16 does."""
        for each in self.model.parameters():
            chosen = torch.rand(each.shape) < 0.02
            each[chosen] *= 1.125
