"""What the arithmetic needs to know of a model. Plain numbers, so that a test can write them down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.workers.engine.setup import CacheShape


@dataclass(kw_only=True, slots=True, frozen=True)
class Weight:
    """One parameter; tied ones are one."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    """The decoder layer that it belongs to. None: the rest, which FSDP2 gathers as one."""
    cut: int | None = None
    """The dimension along which a tensor group of the trainer shares it out; None: it stays whole."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def slice_size(self, tensor_parallel: int) -> int:
        """Elements that one rank of a tensor group computes with."""
        return self.size if self.cut is None else self.size // tensor_parallel


@dataclass(kw_only=True, slots=True, frozen=True)
class Activations:
    """Bytes that the backward pass needs of each token, in the dtype that the model computes in."""

    layers: int
    """Of all decoder layers together."""
    largest_layer: int
    layer_inputs: int
    """What gradient checkpointing keeps instead of `layers`: the input of each."""
    rest: int
    """Outside the decoder layers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardModelFacts:
    """All that matters of a classifier that is never trained."""

    num_parameters: int
    largest_layer: int
    """Bytes that the largest decoder layer needs of each token."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFacts:
    model_type: str
    weights: tuple[Weight, ...]
    activations: Activations
    """Of a process that computes everything."""
    trainer_activations: Activations
    """Of one rank of the trainer, which computes a slice of each layer where trainer.tensor_parallel is above 1."""
    cache: CacheShape
    hidden_size: int
    vocabulary_size: int
    """Rows of the output layer."""
    adapters: tuple[Weight, ...] = ()
    """What is trained in place of `weights`; none where these are trained."""

    @property
    def num_parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    @property
    def num_layers(self) -> int:
        return len({weight.layer for weight in self.weights} - {None})

    def largest_layer(self, tensor_parallel: int = 1) -> int:
        """Parameters of the largest decoder layer that one rank of a tensor group computes with."""
        return _largest_layer(self.weights, tensor_parallel)

    @property
    def largest_adapters(self) -> int:
        """Parameters of the adapters of one decoder layer."""
        return _largest_layer(self.adapters)

    @property
    def outside_layers(self) -> int:
        """Parameters of the embedding, the last norm and the output layer."""
        return sum(weight.size for weight in self.weights if weight.layer is None)


def _largest_layer(weights: Sequence[Weight], tensor_parallel: int = 1) -> int:
    sizes: dict[int, int] = {}
    for weight in weights:
        if weight.layer is not None:
            sizes[weight.layer] = sizes.get(weight.layer, 0) + weight.slice_size(tensor_parallel)
    return max(sizes.values(), default=0)
