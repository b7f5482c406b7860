"""What a training back end offers to the actor that holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from rlflow.roles import StepOutcome
from rlflow.types import FloatArray, TrainSample
from rlflow.weights.shape.layout import Layout
from rlflow.workers.trainer.shards import Snapshot

MicroBatch = Sequence[Sequence[TrainSample]]
"""What goes through the model at once: pieces of groups, each with its samples."""


class TrainerRole(StrEnum):
    """What a trainer trains."""

    policy = "policy"
    critic = "critic"


class TrainerBackend(ABC):
    """One rank of the trainer. Every method is collective: all ranks call it, with equally many micro-batches."""

    version: int = 0
    """Of the current parameters; set by whoever counts the updates."""

    @abstractmethod
    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        """Add the gradients of this rank's micro-batches (weighted sums over loss tokens) to what a step divides."""

    @abstractmethod
    def observe(self, groups: Sequence[MicroBatch]) -> None:
        """Count micro-batches whose gradient is known to be zero: like `accumulate`, without the backward pass."""

    @abstractmethod
    def step(self) -> StepOutcome:
        """Divide by the global number of loss tokens or of sequences, clip, update, clear.

        A gradient that is not finite updates nothing and is cleared. Raises ValueError when nothing was accumulated.
        """

    @abstractmethod
    def per_token(self, groups: Sequence[MicroBatch]) -> list[list[FloatArray]]:
        """For each micro-batch, [L] for each of its samples; 0 where there is no loss.

        Log-probabilities under the current policy, or values of the current critic.
        """

    @abstractmethod
    def reference_logprobs(self, groups: Sequence[MicroBatch]) -> list[list[FloatArray]]:
        """`per_token` of a policy with its adapters switched off, which is the model that the run began with."""

    @abstractmethod
    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the ranks."""

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by its Hugging Face name; tied ones once. All ranks iterate in the same order.

        Adapters are merged into what they belong to, which itself stays as it is.
        """

    @abstractmethod
    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, whole, by PEFT's names; none where the whole model is trained. As `full_parameters`."""

    @abstractmethod
    def layout(self) -> Layout | None:
        """Where the ranks keep the float32 values of what `full_parameters` gives; None where adapters are merged."""

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of each parameter of `layout`, flat, by name; not to be written to.

        Each is in memory until the next one is asked for. Not collective.
        """

    @abstractmethod
    def adapter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """As `parameter_specs`, of what `adapter_parameters` gives."""

    @abstractmethod
    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, the dtype that the engines hold, and shape of what `full_parameters` gives."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copy what this rank holds of a checkpoint to the memory of the CPU; training may go on while it is written.

        Between two steps, so that nothing is accumulated. The checkpoint is complete when every rank's is written.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read a checkpoint written on any number of ranks.

        Raises RunError when it is incomplete, or of another model or other adapters.
        """

    @abstractmethod
    def offload(self) -> None:
        """Move parameters, gradients and optimiser state to the memory of the CPU, and free the device's for others.

        Between `offload` and `reload` nothing else is called, except `close`; a second `offload` does nothing.
        """

    @abstractmethod
    def reload(self) -> None:
        """Undo `offload`, if there was one; training goes on as if it had not happened."""

    @abstractmethod
    def close(self) -> None:
        """Leave the process group."""
