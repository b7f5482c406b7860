"""The trainer's side of a transport, in one rank: what it asks of the back end, and what is asked of it.

`rlflow.workers.trainer.packed.TrainerBackend` implements `WeightSource`; each transport has a `WeightSender`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlflow.roles import StagedWeights
from rlflow.weights.shape.layout import Layout

Specs = list[tuple[str, torch.dtype, tuple[int, ...]]]


class WeightSource(Protocol):
    """One rank of the trainer: the layout of all ranks, this rank's part, and whole parameters.

    Every method but `held` is collective.
    """

    version: int

    def layout(self) -> Layout | None: ...
    def held(self) -> Iterator[tuple[str, Tensor]]: ...
    def parameter_specs(self) -> Specs: ...
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]: ...
    def adapter_specs(self) -> Specs: ...
    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]: ...
    def add_up(self, values: Sequence[float]) -> list[float]: ...


class WeightSender(ABC):
    """One rank of the trainer; the constructors are collective too."""

    @abstractmethod
    def stage(self, version: int) -> StagedWeights | None:
        """Lay out the back end's weights as a version, in the engines' dtype; rank 0 is told where. Collective."""

    def release(self) -> None:  # noqa: B027 - a transport that stages in the memory of the CPU or on disk takes nothing
        """Give back what the staged version takes of the device: no engine reads it any more."""

    def close(self) -> None:  # noqa: B027 - what is on disk stays with the run
        """Stop serving engines."""
