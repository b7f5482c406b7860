"""What a transport asks of the trainer: the ranks' layout, this rank's part, and whole parameters. Implemented by
`rlflow.workers.trainer.packed.TrainerBackend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlflow.weights.shape.layout import Layout

Specs = list[tuple[str, torch.dtype, tuple[int, ...]]]


class WeightSource(Protocol):
    """One rank; every method but `held` is collective."""

    version: int

    def layout(self) -> Layout | None: ...
    def held(self) -> Iterator[tuple[str, Tensor]]: ...
    def parameter_specs(self) -> Specs: ...
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]: ...
    def adapter_specs(self) -> Specs: ...
    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]: ...
    def add_up(self, values: Sequence[float]) -> list[float]: ...
